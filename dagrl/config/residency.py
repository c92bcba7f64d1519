"""How much of an engine is in its devices' memory. Engines on one group take turns by changing it."""

from enum import IntEnum


class Residency(IntEnum):
    """From nothing to everything. A generator's weights return before its cache, so that it can receive new weights."""

    ASLEEP = 0
    """Nothing: the state waits in host memory."""
    WEIGHTS = 1
    """The weights alone: enough to send or receive them."""
    AWAKE = 2
    """Everything that it needs to work."""
