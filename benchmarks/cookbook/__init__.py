"""The unmodified tinker-cookbook against a real server, without the network (`make cookbook`).

Runs the cookbook's own programs as they are installed, small, and writes what they did into docs/cookbook.md. A run
that fails makes the command fail; nothing here is part of the tests.
"""
