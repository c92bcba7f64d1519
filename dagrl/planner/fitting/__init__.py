"""Which engines live together on their GPUs, what is over, and what would help. `fit` is the door."""
