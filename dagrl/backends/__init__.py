"""Models that train, score or generate."""

import os

# Some inference servers turn off NCCL's cuMem allocations. If only one end of a broadcast of weights uses them, the
# other end cannot open its memory, so every engine turns them off, unless the user sets the variable for all.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
