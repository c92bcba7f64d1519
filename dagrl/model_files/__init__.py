"""Files of a model: its config, headers of its weights, tokenizer and chat template."""
