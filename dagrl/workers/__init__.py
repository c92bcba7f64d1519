"""What runs in a worker's process: one rank of an engine, or the host's ops."""
