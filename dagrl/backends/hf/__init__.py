"""A Hugging Face model inside the worker process."""
