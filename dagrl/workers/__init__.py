"""The process of a worker: one rank of an engine, or the host's ops."""
