"""`logprob`: log-probs of sampled tokens."""

from __future__ import annotations

from typing import Literal

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.nodes.base import OpContract, PackingNode, routes_read


class LogprobNode(PackingNode):
    """Log-probs of the sampled tokens under an engine's current weights.

    Skipped if only an update of the same engine reads it, as ``old_logprob``, with one optimizer step for each batch:
    the ratio is 1 then.
    """

    op: Literal["logprob"]

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        reads = ("prompt_tokens", "response_tokens", *routes_read(engine))
        return OpContract(reads, ("logprob",), needs=Capability.SCORE)
