"""Statistics of tensors, computed on their device and read by the host at once: metrics of an objective.

A tally is float64 [5], the fields of a `Stat` in order. Reading one waits for the device, so the tallies of many
micro-batches are read together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dagrl.data.stats import Stat, merge

Tallies = Mapping[str, torch.Tensor]
"""Metrics of a micro-batch by name, each a tally."""


def tally(values: Mapping[str, torch.Tensor], counted: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics of the values, all of shape [N], where `counted` is true, bool [N].

    Other values may be arbitrary, including NaN.
    """
    if not values:
        return {}
    # One more value, not counted, makes the reduction work for N = 0.
    inside = torch.nn.functional.pad(counted, (0, 1))
    table = torch.nn.functional.pad(torch.stack([value.detach().double() for value in values.values()]), (0, 1))
    filled = torch.where(inside, table, 0.0)
    count = inside.sum().double().expand(len(table))
    low = torch.where(inside, table, torch.inf).amin(1)
    high = torch.where(inside, table, -torch.inf).amax(1)
    rows = torch.stack([count, filled.sum(1), filled.square().sum(1), low, high], dim=1)
    return dict(zip(values, rows, strict=True))


def tally_mean(values: torch.Tensor, weight: torch.Tensor, parts: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of `values` [N], weighted by non-negative `weight` [N]; see `Stat.weighted`.

    With `parts` [N], the weighted sum over their sum instead.
    """
    total = (values.detach().double() * weight).sum()
    count = (weight if parts is None else parts).sum().double()
    known = count > 0
    total = torch.where(known, total, 0.0)
    mean = total / torch.where(known, count, 1.0)
    low, high = (torch.where(known, mean, end) for end in (torch.inf, -torch.inf))
    return torch.stack([count, total, mean * total, low, high])


def read_tallies(parts: Sequence[Tallies]) -> dict[str, Stat]:
    """Statistics of all parts together, which may have different names; waits for the device."""
    listed = [(name, row) for part in parts for name, row in part.items()]
    if not listed:
        return {}
    rows = torch.stack([row for _, row in listed]).tolist()
    return merge({name: Stat(*row)} for (name, _), row in zip(listed, rows, strict=True))
