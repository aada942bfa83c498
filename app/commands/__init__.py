"""Commands of `tinsmith` that speak to a running server over HTTP: one file a group, the server in `client.py`."""
