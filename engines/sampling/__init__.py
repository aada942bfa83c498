"""Sampling engines: continuous batches of requests of any adapter, behind one interface."""
