"""The communicators that a plan counts are those that an engine meets in, as if it were on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagrl.backends.families.registry import model_shape
from dagrl.backends.megatron.planning.costs import groups_of_pass, groups_of_update
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.config.schema import ModelSpec

pytestmark = [pytest.mark.soak, pytest.mark.slow]

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": None}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "dense": {"model_type": "qwen3", "tie_word_embeddings": False},
    "mixture": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS},
}
TP, PP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("kind", "ranks", "parallel"),
    [
        *((kind, 2, parallel) for kind in ("tied", "dense") for parallel in ({}, TP, PP)),
        ("dense", 2, {"context_parallel_size": 2}),
        ("dense", 4, TP),
        ("dense", 4, TP | PP),
        ("mixture", 2, {}),
        ("mixture", 2, TP),
        ("mixture", 2, TP | {"expert_tensor_parallel_size": 2}),
        ("mixture", 2, EP),
        ("mixture", 2, TP | EP),
        ("mixture", 4, TP | EP),
    ],
)
def test_a_pass_and_an_update_meet_in_as_many_groups_as_are_counted(
    kind: str, ranks: int, parallel: dict[str, Any], run_engine, samples, objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagrl.backends.megatron.engine import distributed
    from dagrl.backends.megatron.engine.communicators import ReloadableProcessGroup, reloadable

    model = ModelSpec.model_validate(
        {"init": SIZES | HEADS | KINDS[kind], "tokenizer": {"kind": "characters", "alphabet": "ab"}}
    )
    rendezvous = distributed._rendezvous
    monkeypatch.setattr(distributed, "_rendezvous", lambda ranks, _: rendezvous(ranks, reloadable("gloo")))

    def on_rank(engine: Any) -> tuple[int, int]:
        from megatron.core import parallel_state

        met: set[int] = set()

        def inner(group: ReloadableProcessGroup) -> Any:
            if group.size() > 1:
                met.add(id(group))
            return group._inner

        monkeypatch.setattr(ReloadableProcessGroup, "inner", property(inner))
        first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = samples.take(np.arange(first, len(samples), step))
        engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=24)
        of_pass = len(met)
        engine.update([mine], objective, tokens_per_micro_batch=24)
        return of_pass, len(met) - of_pass

    found = run_engine(ranks, on_rank, parallel=parallel, model=model)
    sizes = ParallelSpec(**parallel)
    shape = model_shape(model)
    assert found == [(groups_of_pass(shape, sizes, ranks), groups_of_update(shape, sizes, ranks))] * ranks
