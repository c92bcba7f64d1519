"""Any data, filter, partial rollouts, buffer and overlap: a run that is killed or stopped is the uninterrupted one."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from itertools import batched, chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from local_run import LocalRun, without_ray  # noqa: F401

from dagrl.data.order.sampler import prompt_id, source_of
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState
from dagrl.tracking.metrics_file import ENDS
from dagrl.validation.prepare import PreparedPipeline, prepare

pytestmark = pytest.mark.usefixtures("without_ray")
STEPS = 5
MODULE = '''
def even(response):
    return float(response[:1] in "02468")


class Remembers:
    """A sampler whose choice depends on all of its feedback."""

    def __init__(self, sources, seed):
        self.sources, self.told, self.next = sources, seed, 0

    def take(self, count, step):
        rows = [(name, row) for name, size in self.sources.items() for row in range(size)]
        begin, self.next = self.told + self.next, self.next + count
        return [rows[(begin + each) % len(rows)] for each in range(count)]

    def observe(self, rows):
        for row in rows:
            self.told = (31 * self.told + row["prompt"] + round(8 * row["reward"])) % 1009

    def state(self):
        return {"told": self.told, "next": self.next}

    def load(self, state):
        self.told, self.next = state["told"], state["next"]
'''
WITHOUT_LEARNING = ("shuffled", "file", "column")
BY_PASSES = (*WITHOUT_LEARNING, "tokens", "stages")
BY_WEIGHTS = (*WITHOUT_LEARNING, "adaptive")
KINDS = (*BY_PASSES, "adaptive", "own")

Pipe = dict[str, Any]
TooLong = dict[str, list[bool]]
"""Source -> for each row, whether its prompt is too long."""


def order(kind: str, names: list[str], chance: Random) -> Pipe:
    stages = [
        {"weights": {name: chance.randint(1, 4) for name in names}, **end}
        for end in ({"until_step": 2}, {"until_metric": {"reward/mean": 0.5}, "move_over": 2}, {})
    ]
    orders: Pipe = {
        "file": "file",
        "column": {"by": "extra_info.level", "descending": chance.random() < 0.5},
        "stages": {"stages": stages},
        "adaptive": {"adaptive": {"band": [0.3, 0.7], "skip_solved_for": 2}},
        "own": "data_of_test:Remembers",
    }
    return {"order": orders.get(kind, "shuffled"), "weights_by": "tokens" if kind == "tokens" else "prompts"}


def any_pipeline(tiny: Pipe, chance: Random) -> tuple[str, Pipe, TooLong]:
    """The kind of order, the pipeline, and its data."""

    def maybe() -> bool:
        return chance.random() < 0.5

    pipeline, kind = copy.deepcopy(tiny), chance.choice(KINDS)
    nodes, names = pipeline["nodes"], [f"s{number}" for number in range(chance.randint(1, 3))]
    long = {name: [row > 0 and chance.random() < 0.2 for row in range(chance.randint(3, 9))] for name in names}
    if kind == "own":  # it must not return a prompt twice in a step
        long = dict.fromkeys(names, [False] * 40)
    train = {name: {"path": f"{name}.parquet", "weight": chance.randint(1, 4)} for name in names}
    for source in train.values():
        source["n"] = chance.randint(2, 3)
    count = chance.randint(2, 5)
    pipeline["data"] |= {"train": train, "val": None, "prompts_per_step": count, **order(kind, names, chance)}
    pipeline["schedule"] = {"shards_per_step": chance.randint(1, 2), "max_staleness": chance.randint(0, 2)}
    pipeline["run"] |= {"steps": STEPS, "validate_every": None, "samples_per_step": 0}
    pipeline["run"] |= {"save_every": chance.randint(1, 3), "keep": chance.choice([1, 2, "all"])}
    nodes["reward"]["fn"] = "data_of_test:even"
    nodes["update"] = {"op": "update", "engine": "actor", "read": {"old_logprob": "rollout_logprob"}}
    if maybe():
        nodes["advantage"]["kl_in_reward"] = {"coef": 0.5, "target_kl": 0.1, "horizon": 10}
    else:
        nodes["advantage"]["estimator"] = "rae"
        del nodes["old"], nodes["ref"], pipeline["engines"]["reference"]
    begun = count
    if maybe():
        begun += chance.randint(0, 2)
        nodes["keep"] = {"op": "filter", "max_rounds": 3, "when_short": "fill", "prompts_per_round": begun}
    nodes["rollout"]["sampling"] = {"max_new_tokens": 4}
    if maybe():
        nodes["rollout"] |= {"over_sampling_batch_size": begun + chance.randint(1, 4), "partial_rollout": maybe()}
    if maybe():
        buffer = {"op": "buffer", "groups_per_step": chance.randint(1, 3)}
        buffer["policy"] = chance.choice(["uniform", "fifo", "prioritised", "best", "successes"])
        limits = {"max_uses": chance.randint(1, 3), "max_age": chance.randint(1, 4), "capacity": chance.randint(6, 24)}
        nodes["buffer"] = buffer | {name: value for name, value in limits.items() if maybe()} | {"keep": "all"}
        if buffer["policy"] == "successes":
            nodes["buffer"]["hard_below"] = 0.9
    return kind, pipeline, long


def write(folder: Path, pipeline: Pipe, long: TooLong) -> Path:
    for name, rows in long.items():
        table = [
            {
                "data_source": name,
                "prompt": [{"role": "user", "content": "1" * (20 if is_long else 1 + row % 3) + "+1="}],
                "reward_model": {"style": "rule", "ground_truth": "2"},
                "extra_info": {"level": 7 * row % 5},
            }
            for row, is_long in enumerate(rows)
        ]
        pq.write_table(pa.Table.from_pylist(table), folder / f"{name}.parquet")
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return path


class Told:
    """Records of a run's processes; of a repeated step, those of its last run."""

    def __init__(self, prepared: PreparedPipeline, folder: Path, chance: Random, ends: list[tuple[int, bool]]) -> None:
        """`ends`: where each process but the last ends, and whether by a kill."""
        shutil.rmtree(folder, ignore_errors=True)
        self.processes: list[LocalRun] = []
        for place, killed in [*ends, (None, False)]:
            process = LocalRun(prepared, folder, chance, place, killed=killed)
            self.processes.append(process)
            if process.to_the_end():
                break
        checkpoints = Checkpoints(folder, "all")
        self.states = {step: checkpoints.read(checkpoints.of_step(step)) for step in checkpoints.steps()}
        reads: dict[tuple[int, int], tuple[int, list[int]]] = self.last("reads")
        self.fresh = [prompt for carried, ids in reads.values() for prompt in ids[carried:]]
        self.carried = [prompt for carried, ids in reads.values() for prompt in ids[:carried]]

    def last(self, name: str) -> dict[Any, Any]:
        """A record of `LocalRun`, whose keys are steps, or begin with one."""
        merged: dict[Any, Any] = {}
        for process in self.processes:
            merged = {key: value for key, value in merged.items() if _step(key) < process.first_step}
            merged |= getattr(process, name)
        return dict(sorted(merged.items()))


def _step(key: Any) -> int:
    return key[0] if isinstance(key, tuple) else key


def check(folder: Path, tiny: Pipe, seed: int) -> None:
    chance = Random(seed)
    kind, pipeline, long = any_pipeline(tiny, chance)
    note(f"{kind}, {long}\n{yaml.safe_dump(pipeline, sort_keys=False)}")
    prepared = prepare(write(folder, pipeline, long))
    whole = Told(prepared, folder / "whole", Random(seed), [])
    pieces = whole.processes[0].pieces
    ends = [(chance.randrange(pieces), chance.random() < 0.7) for _ in range(chance.randint(1, 2))]
    note(f"killed, or stopped, at {ends}")
    resumed = Told(prepared, folder / "resumed", Random(seed + 1), ends)
    event(f"first steps: {[process.first_step for process in resumed.processes]}")
    nodes, partial = pipeline["nodes"], pipeline["nodes"]["rollout"].get("partial_rollout", False)
    if "keep" in nodes or not partial or not pipeline["schedule"]["max_staleness"]:
        _are_equal(whole, resumed)
    elif kind in WITHOUT_LEARNING:
        # A step that overlaps takes the unfinished prompts that are there in time, and the other ones in their order.
        assert all(one == other for one, other in zip(whole.fresh, resumed.fresh, strict=False))
    for told in (whole, resumed):
        assert Counter(chain(*told.last("unfinished").values())) == Counter(
            [*told.carried, *told.states[STEPS].carried]
        )
        _accounts_balance(told)
        if kind in BY_PASSES:
            _epochs_are_permutations(told.fresh, list(long.values()))
        if kind in BY_WEIGHTS:
            weights = np.array([source["weight"] for source in pipeline["data"]["train"].values()])
            taken = np.cumsum(np.eye(len(weights))[list(map(source_of, told.fresh))], axis=0)
            shares = np.arange(1, len(taken) + 1)[:, None] * weights / weights.sum()
            assert np.abs(taken - shares).max() < 1


def _are_equal(whole: Told, resumed: Told) -> None:
    for name in ("reads", "batches", "returned", "given"):
        expected = whole.last(name)
        assert resumed.last(name) == expected
        # Also in steps whose work was lost.
        assert all(getattr(process, name).items() <= expected.items() for process in resumed.processes), name

    def kept(told: Told) -> dict[int, tuple[object, ...]]:
        def of(state: RunState) -> tuple[object, ...]:
            return state.order, state.carried, state.kl_weights, state.baselines

        return {step: of(state) for step, state in told.states.items()}

    before, after = kept(whole), kept(resumed)
    # Ctrl-C saves any step.
    assert all(after[step] == before[step] for step in before.keys() & after.keys())
    assert STEPS in before.keys() & after.keys()


def _accounts_balance(told: Told) -> None:
    lines, left = told.last("logged"), told.states[STEPS].carried_tokens
    assert list(lines) == list(range(1, STEPS + 1))
    open_tokens = [tokens for samples in left for tokens in samples if tokens >= 0]
    for unit, held in (("samples", len(open_tokens)), ("tokens", sum(open_tokens))):
        for line in lines.values():
            came = line[f"{unit}/generated"] + line.get(f"{unit}/carried_in", 0)
            held += line.get(f"{unit}/carried_in", 0) - line.get(f"{unit}/carried_out", 0)
            assert came == sum(line[f"{unit}/{end}"] for end in ENDS) + line.get(f"{unit}/carried_out", 0)
        assert held == 0


def _epochs_are_permutations(taken: list[int], sources: list[list[bool]]) -> None:
    for source, long in enumerate(sources):
        usable = {prompt_id(source, row) for row, is_long in enumerate(long) if not is_long}
        for epoch in batched([prompt for prompt in taken if source_of(prompt) == source], len(usable)):
            assert {*epoch} <= usable and len({*epoch}) == len(epoch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "data_of_test.py").write_text(MODULE)
    return folder


COMMON: dict[str, Any] = {
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    # Any seed is as good as a smaller one.
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}


@settings(max_examples=12, **COMMON)
@given(seed=st.integers(0, 2**32))
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, lab: Any, seed: int) -> None:
    check(folder, lab.tiny_pipeline(), seed)


@pytest.mark.soak
@settings(max_examples=2000, **COMMON)
@given(seed=st.integers(0, 2**32))
def test_many_resumed_runs_are_the_uninterrupted_ones(folder: Path, lab: Any, seed: int) -> None:
    check(folder, lab.tiny_pipeline(), seed)
