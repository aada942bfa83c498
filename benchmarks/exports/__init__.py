"""Exported weights in programs that know nothing of this server, compared with what the server says (`make exports`).

Trains a few steps of the default model on a real server, exports the checkpoint in every format, loads each in a fresh
process of the program that it is for, and writes how far they are apart into docs/exports.md.
"""
