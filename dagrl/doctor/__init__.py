"""`dagrl doctor`: what this machine can run, and what is missing.

What is looked at comes through `edges.py`, the only file that touches the machine; the others turn it into lines.
Nothing here imports torch or its kin: what they say of themselves comes from a process of its own, which may crash.
"""
