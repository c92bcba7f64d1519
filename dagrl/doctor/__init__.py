"""Examines this machine for `dagrl doctor`: what it can run, and what is missing.

Nothing here imports torch or a backend: other processes do, which may crash.
"""
