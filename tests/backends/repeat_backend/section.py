"""``backend: repeat`` in a pipeline file."""

from typing import ClassVar, Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec


class RepeatEngineSpec(EngineSpec):
    """A generator that repeats the last token of the prompt."""

    backend: Literal["repeat"]
    """This package."""
    times: int = 1
    """Tokens of each response."""

    capabilities: ClassVar = frozenset({Capability.GENERATE})
