"""How much device and host memory an engine takes, and of what kinds. `engines` is the door."""
