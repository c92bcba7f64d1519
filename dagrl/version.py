"""The version of dagrl."""

__version__ = "0.1.0"
