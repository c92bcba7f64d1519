"""The worker groups of a run, as the driver sees them."""
