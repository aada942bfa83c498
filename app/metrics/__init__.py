"""What operators watch: counted as it happens (`events.py`), or read when it is asked for (`state.py`)."""
