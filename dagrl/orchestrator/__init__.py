"""The run itself: the only package that talks to Ray."""
