"""Models that train, score or generate."""

import os

# Some inference servers turn off this way of NCCL to allocate memory. If only one end of a broadcast of weights uses
# it, the other end cannot open its memory, so every engine turns it off, unless the user sets it for all.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
