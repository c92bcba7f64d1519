"""Runs Megatron-core without a GPU: replacements of CUDA and Transformer Engine, on gloo."""
