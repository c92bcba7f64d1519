"""Shared by backends of servers: the life of responses, and the engine that a worker holds."""
