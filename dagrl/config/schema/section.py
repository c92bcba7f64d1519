"""Base class and number ranges of all sections."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A count. The bound keeps products of counts small."""
Concurrency = Annotated[int, Field(ge=1, le=4096)]
"""Processes or threads that a key starts."""
SlotsPerNode = Annotated[int, Field(ge=0, le=1024)]
"""GPUs or CPU slots of one machine, with a process for each."""
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Threshold = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]
"""Factor of a term of a loss or a reward. Published recipes have factors below 10."""
Reward = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
"""The range of a reward. Advantages square it, in float32."""
Tokens = Annotated[int, Field(ge=1, le=10**8)]
"""Length of a text, up to ten times the longest context of any model."""
Responses = Annotated[int, Field(ge=1, le=10**6)]
"""Responses to one prompt."""
Seconds = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
"""A timeout, some months at most."""
OwnFunction = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
"""``module:function``, looked for beside the pipeline file and on the Python path."""


class Section(BaseModel):
    """A mapping of the pipeline file: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    refused: ClassVar[dict[str, str]] = {}
    """Keys of other frameworks, and why they are not supported here."""
