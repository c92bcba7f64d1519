"""Draws the DAG of a pipeline."""
