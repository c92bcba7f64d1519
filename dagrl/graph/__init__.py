"""The graph of a pipeline: what ops read and write, and the edges inferred from it."""
