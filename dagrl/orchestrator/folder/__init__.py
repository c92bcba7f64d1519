"""The run folder: checkpoints, locks and checks."""
