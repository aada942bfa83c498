"""Training measured against what people have without this server: transformers + peft in a loop of their own.

`command.py` runs `cases.py` by `measure.py`, which gives work to sides in processes of their own (`host.py`) and to
`report.py` what they took. A side has `step`, `cpu_seconds` and `close` (`work.py`) and is chosen in `host._build`.

Other servers for training are not measured here, for they need environments of their own. One that speaks the same
protocol (SkyRL's) is a `ServerSide` whose `serve` runs another command in its own environment; it compiles before its
first step, so it needs a warm-up round for every shape. One with another client (TuFT's) is a side around that client.
Mind there that alpha is 32 on every side, and that the loss is the sum over positions.
"""
