"""Built-in rewards, one file each."""
