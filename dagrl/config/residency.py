"""How much of an engine is in its devices' memory: what engines on one group take turns by."""

from enum import IntEnum


class Residency(IntEnum):
    """From nothing to everything. A generator's weights come back before its cache, so that new ones can come in."""

    ASLEEP = 0
    """Nothing: what matters waits in host memory."""
    WEIGHTS = 1
    """The weights alone: enough to send them, or to take them in."""
    AWAKE = 2
    """All that it needs to work."""
