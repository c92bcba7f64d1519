"""Which rank sits where in a 5D layout, in Megatron's own order: tp fastest, then cp, dp, pp.

The one truth for who computes which rows: ranks with the same `dp` get the same rows, and one of them, the `primary`,
hands in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.spec.schema import ParallelSpec


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of one rank in its engine's layout."""

    tp: int
    cp: int
    dp: int
    pp: int
    primary: bool
    """Whether the rank hands in the results of its data-parallel rank: tp 0, cp 0, last pp."""


def coordinates(parallel: ParallelSpec, ranks: int) -> list[Coordinates]:
    """The coordinates of ranks 0, 1, ... of an engine on `ranks` ranks; the sizes are known to divide."""
    tp_size = parallel.tensor_model_parallel_size
    cp_size = parallel.context_parallel_size
    pp_size = parallel.pipeline_model_parallel_size
    dp_size = parallel.data_parallel_size(ranks)
    assert tp_size * cp_size * dp_size * pp_size == ranks, f"{parallel} does not divide {ranks} ranks"
    places = []
    for rank in range(ranks):
        rest, tp = divmod(rank, tp_size)
        rest, cp = divmod(rest, cp_size)
        pp, dp = divmod(rest, dp_size)
        places.append(Coordinates(tp, cp, dp, pp, primary=tp == 0 and cp == 0 and pp == pp_size - 1))
    return places
