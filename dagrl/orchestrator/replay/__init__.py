"""Replay: runs a recorded node again, alone, and compares what it gives."""
