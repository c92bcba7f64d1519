"""A Hugging Face model as an embedded generator."""
