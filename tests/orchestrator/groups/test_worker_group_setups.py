"""Setup messages of workers, in particular on the slots of servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.inference import build_graph
from dagrl.orchestrator.groups.worker_group import setups
from dagrl.scheduler.placement import make_plan
from dagrl.workers.messages import StartEngine, WorkerInfo

PIPELINE = """\
name: tiny
model: {init: {model_type: qwen3}, tokenizer: {kind: characters, alphabet: "01"}}
data: {train: train.parquet, prompts_per_step: 8, max_prompt_tokens: 8}
groups:
  train: {gpus_per_node: 2}
  rollout: {nodes: 2, gpus_per_node: 4}
engines:
  actor: {backend: megatron, group: train, optimizer: {lr: 1e-3}}
  reference: {backend: megatron, frozen_copy_of: actor}
  generator: {backend: sglang, group: rollout, weights_from: actor, server: {tp_size: 2}}
nodes:
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 3}}
  reward: {op: reward, fn: exact}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}
run: {steps: 6}
"""


@pytest.mark.parametrize(
    ("generator", "rank", "together"),
    [
        ("{tp_size: 2}", 3, [2, 3]),
        ("{tp_size: 4, pp_size: 2}", 5, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("{tp_size: 1}", 5, [5]),
    ],
)
def test_the_slots_of_a_server_are_lost_together(
    tmp_path: Path, generator: str, rank: int, together: list[int]
) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE)
    loaded = load_pipeline(tmp_path / "p.yaml", [f"engines.generator.server={generator}"])
    plan = make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder))
    assert plan.executors["generator"].ranks_lost_with(rank) == together


@pytest.fixture
def setups_of(tmp_path: Path):
    """Executor and overrides -> setup messages of its workers, each on its own port, four GPUs a machine."""

    def make(name: str, *overrides: str, ranks: Sequence[int] | None = None) -> list[StartEngine]:
        (tmp_path / "p.yaml").write_text(PIPELINE)
        loaded = load_pipeline(tmp_path / "p.yaml", overrides)
        executor = make_plan(loaded.pipeline, build_graph(loaded.pipeline, loaded.folder)).executors[name]
        where = {
            rank: WorkerInfo("host", f"10.0.0.{rank // 4}", 4000 + rank, 1, (str(rank % 4),))
            for rank in (range(executor.ranks) if ranks is None else ranks)
        }
        common = StartEngine(loaded.pipeline, None, tmp_path, None, 0, 1, trained=False, keeps_start_weights=False)
        return [*setups(executor, where, common).values()]

    return make


def test_the_ranks_of_a_trainer_meet_at_the_first(setups_of) -> None:
    told = setups_of("actor")
    assert [(each.engine, each.rank, each.world_size) for each in told] == [("actor", 0, 2), ("actor", 1, 2)]
    assert {(each.master_addr, each.master_port, each.gpus) for each in told} == {("10.0.0.0", 4000, ())}
    assert all(each.trained and each.keeps_start_weights for each in told)


def test_the_host_has_no_engine(setups_of) -> None:
    assert [each.engine for each in setups_of("host")] == [None]


def test_the_first_slot_of_each_server_has_the_gpus_of_all(setups_of) -> None:
    told = setups_of("generator")
    assert [each.gpus for each in told] == [("0", "1"), (), ("2", "3"), ()] * 2
    assert [each.master_port for each in told] == [4000, 4000, 4002, 4002, 4004, 4004, 4006, 4006]
    assert [each.master_addr for each in told] == ["10.0.0.0"] * 4 + ["10.0.0.1"] * 4


def test_a_server_on_two_machines_is_started_on_both_and_meets_on_the_first(setups_of) -> None:
    told = setups_of("generator", "engines.generator.server={tp_size: 4, pp_size: 2}")
    every = ("0", "1", "2", "3")
    assert [each.gpus for each in told] == [every, (), (), (), every, (), (), ()]
    assert {(each.master_addr, each.master_port) for each in told} == {("10.0.0.0", 4000)}


def test_a_server_that_joins_later_needs_no_other(setups_of) -> None:
    told = setups_of("generator", ranks=(2, 3))
    assert [(each.rank, each.gpus, each.master_port, each.world_size) for each in told] == [
        (2, ("2", "3"), 4002, 8),
        (3, (), 4002, 8),
    ]
