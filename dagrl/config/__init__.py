"""The schema of a pipeline file, and its loading. Imports neither torch nor Ray."""
