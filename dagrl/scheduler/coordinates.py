"""Which rank sits where in a 5D layout, in Megatron's own order: tp fastest, then cp, dp, pp.

The one truth for who computes which rows: ranks with the same `dp` get the same rows, and one of them, the `primary`,
hands in the result. Experts are laid out anew over the ranks of each pipeline stage: etp fastest, then ep, expert dp.
"""

from __future__ import annotations

from dataclasses import dataclass

from dagrl.config.schema import ParallelSpec


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Place of one rank in its engine's layout."""

    tp: int
    cp: int
    dp: int
    pp: int
    primary: bool
    """Whether the rank hands in the results of its data-parallel rank: tp 0, cp 0, last pp."""
    etp: int = 0
    """Which part of its experts' matrices it holds."""
    ep: int = 0
    """Which of the experts it holds."""
    expert_dp: int = 0
    """Which copy of those experts it holds."""


def coordinates(parallel: ParallelSpec, ranks: int) -> list[Coordinates]:
    """The coordinates of ranks 0, 1, ... of an engine on `ranks` ranks; the sizes are known to divide."""
    tp_size = parallel.tensor_model_parallel_size
    cp_size = parallel.context_parallel_size
    pp_size = parallel.pipeline_model_parallel_size
    dp_size = parallel.data_parallel_size(ranks)
    etp_size, ep_size = parallel.expert_tensor_parallel_size, parallel.expert_model_parallel_size
    stage_size = tp_size * cp_size * dp_size
    assert stage_size * pp_size == ranks, f"{parallel} does not divide {ranks} ranks"
    assert stage_size % (etp_size * ep_size) == 0, f"the experts of {parallel} do not divide {stage_size} ranks"
    places = []
    for rank in range(ranks):
        pp, in_stage = divmod(rank, stage_size)
        rest, tp = divmod(in_stage, tp_size)
        dp, cp = divmod(rest, cp_size)
        rest, etp = divmod(in_stage, etp_size)
        expert_dp, ep = divmod(rest, ep_size)
        primary = tp == 0 and cp == 0 and pp == pp_size - 1
        places.append(Coordinates(tp, cp, dp, pp, primary, etp, ep, expert_dp))
    return places
