"""Sends the weights of a trainer to the processes of a generator."""
