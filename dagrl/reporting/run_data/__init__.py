"""The contents of a page about a run, as values that JSON can hold; start with `run_reader`."""
