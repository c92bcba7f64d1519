"""The Megatron-core engine: trains, and computes log-probs.

Importing the package prepares the process for Megatron, so that its modules can import Megatron at their top: it
filters warnings and, without CUDA, installs the patches of `dagrl.backends.megatron.engine.cpu`.
"""

import os

from dagrl.backends.megatron.engine.cpu.patches import install
from dagrl.backends.megatron.engine.quiet import hush

# Tensor and sequence parallelism overlap communication by the order of kernel launches, which one queue preserves.
# CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
hush()
install()
