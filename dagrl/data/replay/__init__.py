"""Experience replay: which groups a buffer holds and returns, and the files that it keeps them in."""
