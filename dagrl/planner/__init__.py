"""Plans of a pipeline's run: memory, times and layouts. Pure: no torch, no ray, no clock."""
