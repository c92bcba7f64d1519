"""One file for each op: what it does to a batch."""
