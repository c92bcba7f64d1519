"""A change to vLLM 0.26.0 in the process that sends requests: merged outputs keep the experts of their tokens."""

from __future__ import annotations

from functools import wraps
from typing import Any


def keep_routes() -> None:
    """Have vLLM keep the experts of a response, also when its last outputs wait together for their reader.

    vLLM merges outputs that have not been read (``RequestOutput.add``), but not their experts:
    https://github.com/vllm-project/vllm/pull/37094. A busy process would lose them.
    """
    from vllm.outputs import RequestOutput

    merge = RequestOutput.add
    if hasattr(merge, "__wrapped__"):
        return

    @wraps(merge)
    def add(self: Any, later: Any, aggregate: bool) -> None:
        merge(self, later, aggregate)
        # All experts of a response come with its last output.
        for merged, last in zip(self.outputs, later.outputs, strict=True):
            merged.routed_experts = last.routed_experts

    RequestOutput.add = add
