"""Pure tensor math: advantages, losses and divergences."""
