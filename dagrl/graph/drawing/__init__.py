"""A pipeline for people: pictures of its graph, and what it is in a few lines."""
