"""Sums and means over the responses of a packed micro-batch, told to each of their tokens.

A micro-batch holds whole responses, so that these are the numbers of one process, however the batch is cut.
"""

from __future__ import annotations

import torch


class RowReducer:
    """Which tokens belong to which response, and which of them count."""

    def __init__(self, row: torch.Tensor, active: torch.Tensor) -> None:
        """`row`: response of each token, int64 [T], ascending; `active`: bool [T], the others do not count."""
        self.active = active
        self._first = torch.searchsorted(row, row)
        self.counts = self.sums(torch.ones_like(active, dtype=torch.float64))
        """Active tokens of each token's response, float64 [T]."""
        place = torch.arange(len(row), device=row.device)
        self.once = (self._first == place) & (self.counts > 0)
        """One token of each response that has an active one, bool [T]: what statistics of responses count."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the sum of `values` [T] over the active tokens of its response, float64 [T]."""
        # Float64, so that the order in which a GPU adds up does not show in the result.
        nothing = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        return nothing.index_add(0, self._first, torch.where(self.active, values, 0.0).double())[self._first]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean over the active tokens of its response, float64 [T]; 0 where there is none."""
        return self.sums(values) / self.counts.clamp(min=1)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the largest of the active tokens of its response, float64 [T]; -inf where there is none."""
        nothing = torch.full(values.shape, -torch.inf, dtype=torch.float64, device=values.device)
        inside = torch.where(self.active, values.double(), -torch.inf)
        return nothing.scatter_reduce(0, self._first, inside, "amax")[self._first]
