"""The order of the training prompts, step by step. Pure; the driver owns it."""
