"""`logprob`: log-probs of sampled tokens, and statistics of their distributions."""

from __future__ import annotations

from typing import Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import EndpointNode, OpContract, PackingNode, SelectiveNode, routes_read
from dagrl.config.schema.section import Name, PositiveInt

TokenStatistic = Literal["entropy", "prob_square_sum"]


class LogprobNode(SelectiveNode, PackingNode, EndpointNode):
    """Log-probs of the sampled tokens under a model's weights.

    Skipped if only an update of the same engine reads it, as ``old_logprob``, with one optimizer step for each batch:
    the ratio is 1 then.
    """

    op: Literal["logprob"]
    engine: Name | None = None
    """The engine that computes them: a trained engine, a frozen copy, or servers with another model."""
    top_k: PositiveInt | None = None
    """Also write ``topk_ids`` and ``topk_logprob``: this many of the likeliest tokens at each place, and their
    log-probs. With ``write: teacher_logprob`` their names are ``teacher_topk_ids`` and ``teacher_topk_logprob``."""
    candidates: Name | None = None
    """Instead of `top_k`: a column of token ids, such as the ``topk_ids`` of another node. Writes their log-probs, and
    the ids again."""
    hidden_states: bool = False
    """Also write ``hidden_states``, from which an update with ``distillation: {over: vocabulary}`` computes the whole
    distributions of this model: 2 bytes for each token and value of the model's width. With ``write: teacher_logprob``
    the name is ``teacher_hidden_states``."""
    statistics: tuple[TokenStatistic, ...] = ()
    """Also write columns of these names: the ``entropy`` of the distribution, or the sum of its squared probabilities,
    ``prob_square_sum``."""

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        # The generator's routes belong to the policy's own prompt.
        routes = () if "prompt_tokens" in self.read else routes_read(engine)
        ids = (self.candidates,) if self.candidates else ()
        reads = ("prompt_tokens", "response_tokens", *ids, *routes, *self.chosen_by(declared))
        candidates = ("topk_ids", "topk_logprob") if self.top_k or self.candidates else ()
        hidden = ("hidden_states",) if self.hidden_states else ()
        return OpContract(
            tuple(dict.fromkeys(reads)),
            ("logprob", *candidates, *hidden, *dict.fromkeys(self.statistics)),
            needs=None if self.endpoint and not self.engine else Capability.SCORE,
        )

    def named(self, name: str, writes: tuple[str, ...]) -> dict[str, str]:
        stem = name.removesuffix("logprob")
        return {
            "logprob": name,
            **{column: stem + column for column in writes if column.startswith(("topk_", "hidden_"))},
        }
