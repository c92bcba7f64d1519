"""A user's advantage estimator: its arguments and its results."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from dagrl.config.errors import counted
from dagrl.config.schema import AdvantageNode
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Context
from dagrl.ops.view import view_of
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import located
from dagrl.plugins.declarations import load_formula


def own_advantages(node: AdvantageNode, batch: Batch, rewards: np.ndarray, context: Context) -> Column:
    """Advantages by the node's function, float32, ragged as the response mask and 0 outside it.

    `rewards` is what the function gets as ``reward``, float64 [S]. Raises ValueError with the function's location if it
    fails or returns something else.
    """
    loaded = context.resources.once(f"estimator {node.estimator}", lambda: load_formula(node, context.resources.folder))
    assert loaded is not None, "the node names a function"
    function, formula = loaded
    seen = view_of(batch)
    columns = {name: seen[name] for name in ("response_mask", *formula.reads)} | {"reward": rewards}
    result = call_or_stop(node.estimator, function, node.args, columns)
    mask = batch["response_mask"]
    where = located(function, node.estimator)
    with np.errstate(over="ignore"):
        values = _per_token(result, mask, where).astype(np.float32)
    kept = mask.values > 0
    if not np.isfinite(values[kept]).all():
        wrong = values[kept][~np.isfinite(values[kept])][0]
        raise ValueError(f"{where} returned an advantage of {wrong}; advantages must be finite numbers")
    return Column(np.where(kept, values, np.float32(0)), mask.offsets)


def _per_token(result: Any, mask: Column, where: str) -> np.ndarray:
    """The result as one number per token, float64."""
    try:
        # One more than there must be: an iterator may have no end.
        rows = [np.asarray(row, dtype=np.float64) for row in islice(result, len(mask) + 1)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{where} returned {result!r:.100} as advantages; return a number for each response"
        ) from error
    if len(rows) != len(mask):
        count = counted(len(rows), "advantage") if len(rows) < len(mask) else "too many advantages"
        raise ValueError(f"{where} returned {count} for {counted(len(mask), 'response')}")
    for row, length in zip(rows, mask.lengths, strict=True):
        if row.shape not in ((), (length,)):
            raise ValueError(
                f"{where} returned an advantage of shape {list(row.shape)} for a response of {length} tokens; return "
                "one number for each response, or for each an array with one for each of its tokens"
            )
    spread = [np.broadcast_to(row, (length,)) for row, length in zip(rows, mask.lengths, strict=True)]
    return np.concatenate([np.zeros(0), *spread])
