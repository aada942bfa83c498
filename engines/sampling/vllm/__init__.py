"""The sampling engine on vLLM, which runs in a process and a Python environment of its own (`docs/vllm.md`)."""
