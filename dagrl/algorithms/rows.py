"""Reductions over the responses of a packed micro-batch, broadcast to their tokens.

A micro-batch holds whole responses, so no communication is needed.
"""

from __future__ import annotations

import torch


class RowReducer:
    """Assigns tokens to responses, and marks the ones that count."""

    def __init__(self, row: torch.Tensor, active: torch.Tensor) -> None:
        """`row`: response of each token, int64 [T], ascending; `active`: bool [T]; other tokens do not count."""
        self.row = row
        self.active = active
        self._first = torch.searchsorted(row, row)
        self.counts = self.sums(torch.ones_like(active, dtype=torch.float64))
        """Number of active tokens of each token's response, float64 [T]."""
        place = torch.arange(len(row), device=row.device)
        self.once = (self._first == place) & (self.counts > 0)
        """One token of each response with an active token, bool [T]; for statistics over responses."""

    def among(self, known: torch.Tensor) -> RowReducer:
        """The same responses, in which only active tokens in `known`, bool [T], count."""
        return RowReducer(self.row, self.active & known)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` [T] over the active tokens of each token's response, float64 [T]."""
        # Float64, so that the order of summation on a GPU does not matter.
        nothing = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
        return nothing.index_add(0, self._first, torch.where(self.active, values, 0.0).double())[self._first]

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over the active tokens of each token's response, float64 [T]; 0 without any."""
        return self.sums(values) / self.counts.clamp(min=1)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the active tokens of each token's response, float64 [T]. -inf without any, NaN if one is
        NaN.
        """
        nothing = torch.full(values.shape, -torch.inf, dtype=torch.float64, device=values.device)
        inside = torch.where(self.active, values.double(), -torch.inf)
        return nothing.scatter_reduce(0, self._first, inside, "amax")[self._first]

    def suffix_sums(self, values: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
        """The sum of `values` [T] over each token and the active tokens after it in its response, float64 [T].

        A token k positions later counts `discount`**k, at most 1; inactive tokens keep their positions. Takes log2(T)
        steps, without waiting for the device.
        """
        return _scanned(torch.where(self.active, values, 0.0).double(), self.row, discount)

    def prefix_sums(self, values: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
        """The sum over each token and the active tokens before it, as in `suffix_sums`."""
        inside = torch.where(self.active, values, 0.0).double()
        return _scanned(inside.flip(0), self.row.flip(0), discount).flip(0)


def _scanned(total: torch.Tensor, row: torch.Tensor, discount: float) -> torch.Tensor:
    """y[t] = total[t] + discount y[t + 1] within a row, all [T], by doubling the places that a token has the sum of."""
    width = 1
    while width < len(row):
        # A product with 0 would pass on NaN and infinity of another row.
        further = torch.where(row[:-width] == row[width:], total[width:], 0.0)
        total = torch.cat([total[:-width] + discount**width * further, total[-width:]])
        width *= 2
    return total
