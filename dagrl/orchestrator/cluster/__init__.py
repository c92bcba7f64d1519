"""Starts Ray for a run, or joins a Ray cluster, and cleans up afterwards."""
