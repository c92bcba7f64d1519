"""How a pipeline will run: placement and the scheduler. Pure: no torch, no ray, no clock."""
