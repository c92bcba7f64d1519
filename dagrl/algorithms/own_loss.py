"""A user's policy loss: its arguments and its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dagrl.algorithms.kl import ratio_of
from dagrl.algorithms.losses import PolicyLoss
from dagrl.algorithms.rows import RowReducer
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import located

if TYPE_CHECKING:
    from dagrl.backends.base import ResponseTokens


class LossTokens:
    """Response tokens of a micro-batch for a user's loss: tensors [T] by name.

    ``tokens["logprob"]``, ``tokens["entropy"]`` and the columns that the loss reads; a column with one value per
    response repeats it at each of the response's tokens. All are on one device; only the first two have a gradient.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], rows: RowReducer) -> None:
        self._values = values
        self.rows = rows
        """Reductions over responses: ``rows.means(x)``, ``rows.sums(x)`` and ``rows.largest(x)`` return for each token
        the result over its response of `x` [T], ``rows.suffix_sums(x, discount)`` and ``rows.prefix_sums(x)`` the sum
        over it and later tokens, or up to it; ``rows.active`` [T] is False for tokens that are not trained on."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises KeyError for a column that the loss does not declare."""
        if name not in self._values:
            raise KeyError(f"the loss reads no {name!r}; add it to the `reads` of its decorator")
        return self._values[name]

    def __len__(self) -> int:
        return len(self["logprob"])


class OwnLoss:
    """The function at ``module:function`` as a policy loss."""

    def __init__(
        self,
        place: str,
        function: Callable[..., object],
        args: Mapping[str, object],
        reads: Collection[str],
        per_response: Collection[str] = (),
    ) -> None:
        """`reads`: its columns; those in `per_response` have one value per response."""
        self.columns = tuple(name for name in reads if name != "old_logprob")
        """Columns to request; ``old_logprob`` is always available."""
        self._place, self._function, self._args = place, function, args
        self._where = located(function, place)
        self._per_response = frozenset(per_response)

    def __call__(self, tokens: ResponseTokens, logprobs: Mapping[str, torch.Tensor], rows: RowReducer) -> PolicyLoss:
        """The loss of each token. `logprobs` are the columns of log-probs, with finite values at inactive tokens.

        Raises ValueError with the function's location if it fails or returns something else.
        """
        values = {"logprob": tokens.logprob, "old_logprob": logprobs["old_logprob"]}
        if tokens.entropy is not None:
            values["entropy"] = tokens.entropy
        for name in self.columns:
            column = logprobs.get(name, tokens.columns[name])
            values[name] = column[tokens.row] if name in self._per_response else column
        result = call_or_stop(self._place, self._function, self._args, LossTokens(values, rows))
        loss, clipped = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        self._check(loss, tokens.logprob)
        if clipped is None:
            clipped = torch.zeros_like(rows.active)
        elif not isinstance(clipped, torch.Tensor) or clipped.shape != loss.shape or clipped.dtype != torch.bool:
            raise ValueError(f"{self._where} returned no tensor of {len(rows.active)} bools as the clipped tokens")
        ratio = ratio_of((tokens.logprob - values["old_logprob"]).detach())
        # The loss of inactive tokens may have any value.
        return PolicyLoss(torch.where(rows.active, loss, 0.0), ratio, clipped)

    def _check(self, loss: Any, logprob: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor):
            raise ValueError(f"{self._where} returned {loss!r:.100}; return a tensor with the loss of each token")
        if loss.shape != logprob.shape:
            raise ValueError(
                f"{self._where} returned a tensor {list(loss.shape)} for {len(logprob)} tokens; return the loss of "
                "each token, neither summed nor averaged"
            )
        if logprob.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"{self._where} returned a loss without gradient; let it depend on tokens['logprob'], not detached"
            )
