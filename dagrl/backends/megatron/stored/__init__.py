"""Folders in Megatron's distributed format, read and written without Megatron, whose import takes many seconds."""

import warnings

# A folder is converted in one process, as torch assumes then.
warnings.filterwarnings(
    "ignore", message=r"torch\.distributed is disabled, unavailable or uninitialized", category=UserWarning
)
