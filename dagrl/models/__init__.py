"""What can be known of a model without its weights: family, shape, operations; and of the GPUs that it goes to."""
