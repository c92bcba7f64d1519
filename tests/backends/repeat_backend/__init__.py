"""A backend in one folder: its responses repeat the last token of the prompt."""
