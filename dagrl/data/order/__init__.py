"""The order of the training prompts: which ones each step takes. Pure; the driver owns it."""
