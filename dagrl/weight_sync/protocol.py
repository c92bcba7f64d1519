"""What senders and takers of weights tell the driver, in plain words: it works without torch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagrl.weight_sync.channel import Address

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Offer:
    """Where takers find a sender."""

    address: Address
    gpu: str
    """The GPU that the sender's buffers are on, by a name that is the same everywhere; empty for the host's memory."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """What a sync has come to on one rank of a trainer."""

    nbytes: int
    """Bytes of all weights."""
    used: int | None
    """The tensors that any taker has a place for, a bit for each; None where they have told before."""
    names: tuple[str, ...]
    """Beside `used`: names of the tensors, the lowest bit's first."""


def refuse_unknown_names(sent: Sequence[SendReport]) -> None:
    """ValueError for tensors that none of the takers of all ranks has a place for; they would be left out silently."""
    told = [each for each in sent if each.used is not None]
    used = functools.reduce(operator.or_, (each.used or 0 for each in told), 0)
    unknown = [name for place, name in enumerate(told[0].names) if not used >> place & 1] if told else []
    if unknown:
        raise ValueError(
            f"the generator has no place for {shortened(unknown)}: the trainer's model and its own must be the same"
        )


def shortened(names: Iterable[str]) -> str:
    """Some of the names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"


def first_line(error: BaseException) -> str:
    """What an error says, without what libraries write below it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
