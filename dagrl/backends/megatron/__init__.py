"""Megatron-core: trains, and computes log-probs and values."""
