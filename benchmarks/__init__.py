"""Measurements of a real server on this machine (`make bench`). Nothing here decides whether tests pass."""
