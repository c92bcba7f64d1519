"""Memory, seconds, layouts and remedies of Megatron engines, for `dagrl plan`. Imports neither torch nor Megatron."""
