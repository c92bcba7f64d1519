"""Simulation of a run: its scheduler, driven by the seconds of its commands; start with `simulate`."""
