"""A policy loss of the user's own: what it is given, and what it may return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dagrl.algorithms.losses import PolicyLoss, ratio_of
from dagrl.algorithms.rows import RowReducer
from dagrl.graph.plugins.custom import located, raised_by

if TYPE_CHECKING:
    # The contract only: formulas do not need engines to run.
    from dagrl.backends.base import ResponseTokens


class LossTokens:
    """The response tokens of a micro-batch as a loss of the user's own sees them: tensors [T] by name.

    ``tokens["logprob"]``, ``tokens["entropy"]`` and the columns that the loss reads; a column with one value for each
    response has it at each of the response's tokens. All are on one device, and only the first two have a gradient.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], rows: RowReducer) -> None:
        self._values = values
        self.rows = rows
        """Which tokens are a response: ``rows.means(x)``, ``rows.sums(x)`` and ``rows.largest(x)`` say to each token
        what `x` [T] comes to over its response; ``rows.active`` [T] is False where a token is not trained on."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """KeyError for what the loss does not read."""
        if name not in self._values:
            raise KeyError(f"the loss reads no {name!r}; add it to the `reads` of its decorator")
        return self._values[name]

    def __len__(self) -> int:
        """Tokens, T."""
        return len(self["logprob"])


class OwnLoss:
    """The function at ``module:function`` as a policy loss."""

    def __init__(
        self,
        place: str,
        function: Callable[..., Any],
        args: Mapping[str, Any],
        reads: Collection[str],
        per_response: Collection[str] = (),
    ) -> None:
        """`reads`: its columns, of which those in `per_response` have one value for each response."""
        self.columns = tuple(name for name in reads if name != "old_logprob")
        """What the objective has to ask for; ``old_logprob`` it has anyway."""
        self._place, self._function, self._args = place, function, args
        self._where = located(function, place)
        self._per_response = frozenset(per_response)

    def __call__(self, tokens: ResponseTokens, logprobs: Mapping[str, torch.Tensor], rows: RowReducer) -> PolicyLoss:
        """The loss of each token; `logprobs` are the columns of log-probs, harmless where a token does not count.

        ValueError, with the line, where the function fails or returns no such loss.
        """
        values = {"logprob": tokens.logprob, "old_logprob": logprobs["old_logprob"]}
        if tokens.entropy is not None:
            values["entropy"] = tokens.entropy
        for name in self.columns:
            column = logprobs.get(name, tokens.columns[name])
            values[name] = column[tokens.row] if name in self._per_response else column
        try:
            result = self._function(LossTokens(values, rows), **self._args)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise ValueError(f"{self._place} {raised_by(self._function, error)}") from error
        loss, clipped = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        self._check(loss, tokens.logprob)
        if clipped is None:
            clipped = torch.zeros_like(rows.active)
        elif not isinstance(clipped, torch.Tensor) or clipped.shape != loss.shape or clipped.dtype != torch.bool:
            raise ValueError(f"{self._where} returned no tensor of {len(rows.active)} bools as what was clipped")
        ratio = ratio_of((tokens.logprob - values["old_logprob"]).detach())
        # Tokens that do not count may have come to anything.
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
