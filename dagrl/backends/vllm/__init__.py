"""``backend: vllm``: servers that generate."""
