"""The operations of a pipeline, one file per op."""
