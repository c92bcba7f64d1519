"""What a page shows of a run, as values that JSON can hold; start with `run_reader`."""
