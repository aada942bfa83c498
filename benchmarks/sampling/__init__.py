"""Sampling measured against what people have without this server: transformers' `generate`, with peft for adapters."""
