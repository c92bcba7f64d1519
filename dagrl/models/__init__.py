"""Facts about a model without its weights: family, shape, operations; and of the GPUs that it goes to."""
