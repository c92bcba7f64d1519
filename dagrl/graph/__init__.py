"""The graph of a pipeline: columns that ops read and write, and the edges inferred from them."""
