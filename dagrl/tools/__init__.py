"""Built-in tools for multi-turn rollouts, one file each."""
