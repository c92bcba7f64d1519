"""Replay: runs a recorded node again, alone, and compares the results."""
