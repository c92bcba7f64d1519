"""Models that train, score or generate."""

import os

# A way of NCCL to allocate memory, which SGLang turns off in its processes. Where it is on at one end of a broadcast of
# weights only, the other cannot open its memory: no engine has it on, unless whoever runs the pipeline says so for all.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
