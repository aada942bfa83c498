"""The JSON bodies and results of the HTTP API, one resource per file. Protobuf bodies: see `schemas/proto`."""
