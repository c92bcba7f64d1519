"""Ray for the length of a run: found or started, told about, ended."""
