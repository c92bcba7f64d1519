"""The Megatron-core engine: trains, and computes log-probs.

Importing the package readies the process for megatron, so that its modules may import megatron at their top: the noise
of that import is filtered, and without CUDA the stand-ins of `dagrl.backends.megatron.engine.cpu` are put in place.
"""

import os

from dagrl.backends.megatron.engine.cpu.patches import install
from dagrl.backends.megatron.engine.quiet import hush

# Tensor and sequence parallelism overlap communication by the order in which kernels are queued: one queue keeps it.
# CUDA reads it when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
hush()
install()
