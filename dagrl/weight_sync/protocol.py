"""Messages from senders of weights to the driver. Does not import torch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagrl.weight_sync.channel import Address

type WeightDigests = dict[str, tuple[str, float]]
"""Tensor by its Hugging Face name -> digest of its bits, and its norm."""

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Offer:
    """The address of a sender for receivers."""

    address: Address
    gpu: str
    """UUID of the GPU with the sender's buffers; empty if it serves receivers anywhere."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """Result of a sync on one rank of a trainer."""

    nbytes: int
    """Bytes of all weights."""
    used: int | None
    """Bit mask of the tensors that any receiver uses; None if the receivers reported it in an earlier sync."""
    names: tuple[str, ...]
    """Names of the tensors for the bits of `used`, lowest bit first."""


def refuse_unknown_names(reports: Sequence[SendReport]) -> None:
    """Raise ValueError for tensors that no receiver of any rank uses, which would be dropped silently."""
    reports = [report for report in reports if report.used is not None]
    used = functools.reduce(operator.or_, (report.used or 0 for report in reports), 0)
    unknown = [name for bit, name in enumerate(reports[0].names) if not used >> bit & 1] if reports else []
    if unknown:
        raise ValueError(
            f"the generator has no parameter for {shortened(unknown)}; "
            "use the same model for the trainer and the generator"
        )


def shortened(names: Iterable[str]) -> str:
    """The first few names, and the number of others."""
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
