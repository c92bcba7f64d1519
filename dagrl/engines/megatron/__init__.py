"""Megatron-core as a training engine."""
