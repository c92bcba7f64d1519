"""Environments of other packages, as agents: one file for each package. See `docs/environments.md`.

They run in the Python that has the package, which need not be dagrl's: modules here import the standard library, their
own package, and each other.
"""
