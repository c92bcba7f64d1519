"""One file for each reward."""
