"""Seconds of servers of all backends, as `dagrl plan` estimates them."""

from __future__ import annotations

from typing import ClassVar

from dagrl.backends.planning.costs import EngineCosts, PlannedBatch


class ServerCosts(EngineCosts):
    """Seconds of one engine of servers."""

    scores_share_prompts: ClassVar[bool] = True
    """Whether rows to score use the cache of a common prompt."""

    def forward(self, batch: PlannedBatch) -> float:
        """Return the seconds of the log-probs of given tokens: a prefill, and the head at the tokens of responses."""
        rows, lengths = batch.rows / self.engine.executor.replicas, batch.lengths
        shared = batch.per_prompt if self.scores_share_prompts and self.server.shares_prompts else 1
        tokens = rows * (lengths.prompt / shared + lengths.response)
        return self.server.prefill(tokens, lengths.row) + self.server.predictions(rows * lengths.response)
