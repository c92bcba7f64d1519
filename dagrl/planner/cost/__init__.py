"""Seconds of whatever a pipeline's plan tells its engines to do. `costs` is the door."""
