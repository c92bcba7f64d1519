"""Estimates before a run: the memory, time and layout of engines. Imports neither torch nor Ray."""
