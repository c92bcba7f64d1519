"""Examines this machine for `dagrl doctor`: supported features and missing parts.

Nothing here imports torch or a backend: other processes do, because they may crash.
"""
