"""Loads the files of a pipeline into its schema, and keeps the line of each value."""
