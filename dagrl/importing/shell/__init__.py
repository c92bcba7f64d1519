"""Reads bash scripts as data: which commands would be called with which words. Nothing is executed."""
