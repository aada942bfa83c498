"""The protobuf schema of the wire and the code generated from it. Nothing here is written by hand but the .proto."""
