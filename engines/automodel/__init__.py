"""NeMo Automodel as an engine; see docs/engines.md."""
