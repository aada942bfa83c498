"""VeOmni as an engine; see docs/engines.md."""
