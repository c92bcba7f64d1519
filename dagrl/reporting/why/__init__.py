"""Explains why steps of a run take as long as they do: `dagrl why`. Start with `explain`."""
