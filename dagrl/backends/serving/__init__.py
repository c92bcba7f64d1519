"""What backends of servers share: the life of responses, and the engine that a worker holds."""
