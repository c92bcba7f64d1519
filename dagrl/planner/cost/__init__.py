"""Seconds of a pipeline's commands and steps; start with `costs`."""
