"""Statistics of tensors, taken where they lie and read by the host in one go: what an objective reports.

A tally is float64 [5], the fields of a `Stat` in their order. Reading one waits for the device, so that the tallies of
many micro-batches are read together, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dagrl.data.stats import Stat, merge

Tallies = Mapping[str, torch.Tensor]
"""Metrics of a micro-batch by name, each a tally."""


def tally(values: Mapping[str, torch.Tensor], counted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics of the values, all of one shape [N], at the places where `counted` is true, bool [N].

    What stands at other places may be anything, NaN included.
    """
    if not values:
        return {}
    # One place more, not counted, so that there is something to reduce where N is 0.
    inside = torch.nn.functional.pad(counted, (0, 1))
    table = torch.nn.functional.pad(torch.stack([each.detach().double() for each in values.values()]), (0, 1))
    filled = torch.where(inside, table, 0.0)
    count = inside.sum().double().expand(len(table))
    low = torch.where(inside, table, torch.inf).amin(1)
    high = torch.where(inside, table, -torch.inf).amax(1)
    rows = torch.stack([count, filled.sum(1), filled.square().sum(1), low, high], dim=1)
    return dict(zip(values, rows, strict=True))


def tally_mean(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mean of `values` [N], weighted by `weight` [N], none negative; see `Stat.weighted`."""
    total, count = (values.detach().double() * weight).sum(), weight.sum().double()
    known = count > 0
    total = torch.where(known, total, 0.0)
    mean = total / torch.where(known, count, 1.0)
    low, high = (torch.where(known, mean, end) for end in (torch.inf, -torch.inf))
    return torch.stack([count, total, mean * total, low, high])


def read_tallies(parts: Sequence[Tallies]) -> dict[str, Stat]:
    """Statistics of all parts together, each of which may lack some; waits for the device."""
    listed = [(name, each) for part in parts for name, each in part.items()]
    if not listed:
        return {}
    rows = torch.stack([each for _, each in listed]).tolist()
    return merge({name: Stat(*row)} for (name, _), row in zip(listed, rows, strict=True))
