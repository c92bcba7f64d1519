"""The graph of a pipeline: columns, what ops read and write, and the edges inferred from them."""
