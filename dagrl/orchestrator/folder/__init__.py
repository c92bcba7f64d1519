"""What a run leaves on disk, and finds there again."""
