"""Megatron-core without a GPU: stand-ins for CUDA and for Transformer Engine, on gloo."""
