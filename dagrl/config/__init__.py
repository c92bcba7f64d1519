"""What a pipeline file may say: its schema and its loading. Imports neither torch nor Ray."""
