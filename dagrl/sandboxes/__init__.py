"""Sandboxes in which agents' functions run what a policy writes: one file for each provider. See `docs/sandboxes.md`.

They run in the Python of the agent's function, which need not be dagrl's: modules here import the standard library, the
client of their provider, and each other. A provider is imported only if a pipeline names it.
"""
