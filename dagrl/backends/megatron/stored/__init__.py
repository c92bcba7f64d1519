"""Folders in Megatron's distributed format, read and written without Megatron, whose import takes many seconds."""
