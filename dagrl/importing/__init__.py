"""Translates scripts and configurations of other frameworks into pipelines.

`sources` reads a file into settings with their lines, a package for each framework holds its table of rules, and
`table` applies the rules to the settings. Imports neither torch nor Ray.
"""
