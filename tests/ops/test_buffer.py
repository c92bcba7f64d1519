"""What a buffer keeps in files, and what it returns to later steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from work import changed

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema import LossSpec, RolloutCorrectionSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.tables import write_tables
from dagrl.ops.base import OpInput, Output
from dagrl.ops.buffer import buffer

NAMES = ("sample_id", "group_id", "prompt_tokens", "response_tokens", "rollout_logprob", "policy_version", "reward")
ROLLOUT = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 3}}
Step = Callable[..., tuple[Output, Output]]


def batch_of(bench, step: int, *, rewards=((1, 0), (0, 1)), groups=(0, 1), **columns: Any) -> Batch:
    """Groups of two samples; a response's tokens and log-probs tell its step."""
    rows = [2 * group + sample for group in groups for sample in (0, 1)]
    numbers = [group for group in groups for _ in (0, 1)]
    values = {
        "group_id": numbers,
        "prompt_tokens": [f"{group}+1=" for group in numbers],
        "response_tokens": [f"{step}{row}"[:3] for row in rows],
        "rollout_logprob": [[-step, -row] for row in rows],
        "policy_version": [step - 1] * len(rows),
        "reward": [reward for pair in rewards for reward in pair],
    }
    batch = bench.batch(rows, **values)
    return batch.with_columns({"sample_id": Column(np.array(rows)), **columns})


@pytest.fixture
def step(bench) -> Step:
    def run(number: int, batch: Batch | None = None, *, committed: int = 0, names=NAMES, run=None, **options: Any):
        node = {"op": "buffer", "groups_per_step": 2, **options}
        context = bench.context(
            "replay", step=number, nodes={"rollout": ROLLOUT, "replay": node}, run=run or {"steps": 9}
        )
        outputs = {name: name for name in (*names, "is_replayed")}
        context = changed(context, outputs=outputs, committed=committed)
        own, returned = buffer([OpInput(0, batch or batch_of(bench, number))], context)
        return own, returned

    return run


def files(bench) -> list[str]:
    return sorted(path.name for path in (bench.folder / "run" / "buffer" / "replay").iterdir())


def table(bench, name: str) -> list[dict]:
    return pq.read_table(bench.folder / "run" / "buffer" / "replay" / name).to_pylist()


def test_a_first_step_is_as_it_is_without_a_buffer(bench, step) -> None:
    own, returned = step(1)
    assert own.rows.tolist() == [0, 1, 2, 3]
    assert own.columns["is_replayed"].values.tolist() == [0, 0, 0, 0]
    assert set(own.columns) == {*NAMES, "is_replayed"}
    assert set(own.uncounted) == set(NAMES), "its tokens are counted already"
    assert not len(returned.rows)
    assert set(returned.columns) == set(own.columns)
    assert {name: stat.mean for name, stat in returned.stats.items() if name != "buffer/bytes"} == {
        "buffer/rows": 4, "buffer/returned": 0, "buffer/evicted": 0,
    }  # fmt: skip


def test_a_group_comes_back_as_it_was_under_new_ids(bench, step, texts) -> None:
    step(1)
    own, returned = step(2)
    assert own.rows.tolist() == [0, 1, 2, 3]
    assert returned.rows.tolist() == [14, 15, 16, 17]
    assert returned.columns["sample_id"].values.tolist() == [14, 15, 16, 17]
    assert returned.columns["group_id"].values.tolist() == [7, 7, 8, 8]
    assert texts(returned.columns["response_tokens"]) == ["10", "11", "12", "13"]
    # The log-probs under the policy that has sampled it, and the version of that.
    assert returned.columns["rollout_logprob"].values.tolist() == [-1, 0, -1, -1, -1, -2, -1, -3]
    assert returned.columns["policy_version"].values.tolist() == [0, 0, 0, 0]
    assert returned.columns["reward"].values.tolist() == [1, 0, 0, 1]
    assert returned.columns["is_replayed"].values.tolist() == [1, 1, 1, 1]
    for name, column in returned.columns.items():
        assert column.values.dtype == own.columns[name].values.dtype
    assert returned.stats["buffer/age"].mean == 1
    assert returned.stats["buffer/uses"].mean == 1
    assert returned.stats["buffer/rows"].mean == 8
    assert returned.uncounted == ("demonstration",)


def test_groups_without_differences_are_not_kept(bench, step) -> None:
    step(1, batch_of(bench, 1, rewards=((1, 1), (0, 1))))
    _, returned = step(2, batch_of(bench, 2, rewards=((0, 0), (1, 1))))
    assert returned.columns["reward"].values.tolist() == [0, 1]
    assert returned.stats["buffer/rows"].mean == 2


def test_samples_whose_agent_failed_do_not_count(bench, step) -> None:
    excluded = Column(np.array([0, 1, 0, 0], np.float32))
    step(1, batch_of(bench, 1, excluded=excluded))
    assert [row["group"] for row in table(bench, "index_1.parquet")] == [1]
    step(2, batch_of(bench, 2, excluded=Column(np.ones(4, np.float32)), rewards=((0, 1), (1, 0))))
    assert len(table(bench, "index_2.parquet")) == 1


def test_groups_of_different_sizes_come_back(bench, step) -> None:
    whole = batch_of(bench, 1)
    step(1, whole.take(np.array([0, 1, 2])), keep="all")
    _, returned = step(2, keep="all", policy="fifo")
    assert returned.rows.tolist() == [14, 15, 16]
    assert returned.columns["group_id"].values.tolist() == [7, 7, 8]


def test_the_rows_of_a_trajectory_return_together(bench) -> None:
    rollout = {**ROLLOUT, "agent": {"function": "bots:solve", "sequences": 2}}
    nodes = {"rollout": rollout, "replay": {"op": "buffer", "groups_per_step": 2}}
    batch = batch_of(bench, 1, rewards=((1, 1), (0, 0))).with_columns({"group_id": Column(np.zeros(4, dtype=np.int64))})
    for number in (1, 2):
        context = bench.context("replay", step=number, nodes=nodes)
        context = changed(context, outputs={name: name for name in NAMES})
        _, returned = buffer([OpInput(0, batch)], context)
    (entry,) = (row for row in table(bench, "index_2.parquet") if row["step"] == 1)
    assert (entry["rows"], entry["mean"], entry["spread"]) == (4, 0.5, 0.5)
    # Every second row begins a trajectory, by its number.
    assert returned.rows.tolist() == [28, 29, 30, 31]
    assert returned.columns["reward"].values.tolist() == [1, 1, 0, 0]


def test_images_that_samples_share_are_kept_once(bench, step) -> None:
    pixels = Column.ragged([np.arange(9), np.arange(3)], "uint8")
    shared = Column.shared(Column(pixels.values.reshape(-1, 3), pixels.offsets // 3), np.array([0, 0, 1, 1]))
    names = (*NAMES, "pixel_values")
    step(1, batch_of(bench, 1, pixel_values=shared), names=names)
    _, returned = step(2, batch_of(bench, 2, pixel_values=shared), names=names)
    back = returned.columns["pixel_values"]
    assert [back[row].tolist() for row in range(4)] == [shared[row].tolist() for row in range(4)]
    assert len(back.values) == 4, "two images, not four"


def test_a_step_done_again_gives_the_same(bench, step) -> None:
    for number in range(1, 5):
        step(number, policy="prioritised", max_uses=2)
    before, index = step(5, policy="prioritised", max_uses=2), table(bench, "index_5.parquet")
    for number in (6, 7, 4, 5):
        again = step(number, policy="prioritised", max_uses=2)
    for one, other in zip(before, again, strict=True):
        assert one.rows.tolist() == other.rows.tolist()
        for name in one.columns:
            assert one.columns[name].values.tolist() == other.columns[name].values.tolist()
    assert table(bench, "index_5.parquet") == index


def test_files_stay_while_a_checkpoint_can_need_them(bench, step) -> None:
    options = {"capacity": 4, "policy": "fifo"}
    step(1, **options)
    (bench.folder / "run" / "checkpoints" / "step_1").mkdir(parents=True)
    (bench.folder / "run" / "checkpoints" / "step_9.torn").mkdir()
    for number in range(2, 6):
        step(number, committed=number - 1, **options)
    assert files(bench) == ["index_1.parquet", "index_4.parquet", "index_5.parquet", *(
        f"step_{number}.parquet" for number in (1, 4, 5)
    )]  # fmt: skip
    (bench.folder / "run" / "checkpoints" / "step_1").rmdir()
    step(6, committed=5, **options)
    assert files(bench) == ["index_5.parquet", "index_6.parquet", "step_5.parquet", "step_6.parquet"]


def test_a_step_whose_checkpoint_is_still_being_written_keeps_its_files(bench, step) -> None:
    run = {"steps": 9, "save_every": 2}
    for number in range(1, 4):
        step(number, committed=number - 1, capacity=4, run=run)
    assert "index_2.parquet" in files(bench)
    step(4, committed=3, capacity=4, run=run)
    assert {"index_2.parquet", "step_2.parquet"} <= set(files(bench))
    (bench.folder / "run" / "checkpoints" / "step_4").mkdir(parents=True)
    step(5, committed=4, capacity=4, run=run)
    assert files(bench) == ["index_4.parquet", "index_5.parquet", "step_4.parquet", "step_5.parquet"]


def test_the_last_groups_of_a_file_move_to_a_new_one(bench, step) -> None:
    rewards = [(0, 1)] * 5
    options = {"policy": "prioritised", "capacity": 12, "groups_per_step": 1}
    step(1, batch_of(bench, 1, groups=range(5), rewards=[(0, 4), *[(0, 1)] * 4]), **options)
    step(2, batch_of(bench, 2, groups=range(5), rewards=[(0, 3)] * 5), **options)
    index = table(bench, "index_2.parquet")
    assert [(row["step"], row["group"]) for row in index] == [(1, 0), *((2, group) for group in range(5))]
    assert {row["file"] for row in index} == {2}
    step(3, batch_of(bench, 3, groups=range(5), rewards=rewards), committed=2, **options)
    assert "step_1.parquet" not in files(bench)
    for number in range(4, 9):
        _, returned = step(number, committed=number - 1, **options)
        assert max(returned.columns["reward"].values) >= 3


def test_groups_with_further_columns_return_and_move(bench, step) -> None:
    options = {"policy": "prioritised", "capacity": 12, "groups_per_step": 1}
    step(1, batch_of(bench, 1, groups=range(5), rewards=[(0, 4), *[(0, 1)] * 4]), **options)
    # Other nodes read less, in another order, since the run was stopped.
    fewer = ("reward", *(name for name in NAMES if name not in ("reward", "rollout_logprob")))
    for number in (2, 3):
        _, returned = step(
            number, batch_of(bench, number, groups=range(5), rewards=[(0, 3)] * 5), names=fewer, **options
        )
    assert {row["file"] for row in table(bench, "index_2.parquet")} == {2}
    assert set(returned.columns) == {*fewer, "is_replayed"}


def spoil(path: Path, how: str) -> None:
    match how:
        case "missing":
            path.unlink()
        case "torn":
            path.write_bytes(path.read_bytes()[:-20])
        case "empty":
            path.write_bytes(b"")
        case "other":
            pq.write_table(pq.read_table(path).select([0]), path)


@pytest.mark.parametrize("name", ["index_1.parquet", "step_1.parquet"])
@pytest.mark.parametrize("how", ["missing", "torn", "empty", "other"])
def test_a_file_that_is_not_whole_is_named(bench, step, name, how) -> None:
    step(1)
    path = bench.folder / "run" / "buffer" / "replay" / name
    spoil(path, how)
    with pytest.raises(
        ValueError, match=rf"{path.parent}.* remove .*/buffer/replay to begin with an empty buffer$"
    ) as error:
        step(2)
    assert "\n" not in str(error.value)


def test_an_empty_folder_is_an_empty_buffer(bench, step) -> None:
    _, returned = step(4)
    assert not len(returned.rows)


def test_a_full_disk_is_an_error_that_names_the_file(bench, step) -> None:
    folder = bench.folder / "run" / "buffer" / "replay"
    folder.mkdir(parents=True)
    (folder / ".step_1.parquet").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*/step_1\.parquet: No space left on device$"):
        step(1)
    assert not (folder / "index_1.parquet").exists()


def test_a_kill_between_two_files_leaves_the_buffer_of_the_step_before(bench, step, monkeypatch) -> None:
    step(1)
    before = table(bench, "index_1.parquet")

    def killed(tables: Any, path: Path) -> None:
        if path.name == "index_2.parquet":
            raise KeyboardInterrupt
        write_tables(tables, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("dagrl.data.replay_buffer.write_tables", killed)
        step(2)
    assert "step_2.parquet" in files(bench)
    assert table(bench, "index_1.parquet") == before
    _, returned = step(2)
    assert returned.columns["policy_version"].values.tolist() == [0, 0, 0, 0]


def test_a_metric_of_tokens_is_refused(bench, step) -> None:
    with pytest.raises(ValueError, match="`response_tokens` has several; name another metric"):
        step(1, metric="response_tokens")


@pytest.mark.parametrize("choice", ["old", "token"])
def test_the_ratio_of_a_returned_sample_is_that_to_the_policy_that_sampled_it(bench, step, choice) -> None:
    step(1, batch_of(bench, 1))
    _, returned = step(2, batch_of(bench, 2))
    columns = {"rollout_logprob": returned.columns["rollout_logprob"]}
    count = len(columns["rollout_logprob"].values)
    offsets = columns["rollout_logprob"].offsets
    for name, value in (("advantage", 1.0), ("response_mask", 1.0)):
        columns[name] = Column(np.full(count, value, np.float32), offsets)
    columns["old_logprob"] = columns["rollout_logprob"]
    if choice == "token":
        # The weights before the update are those that are trained.
        columns["old_logprob"] = Column(np.full(count, -0.5, np.float32), offsets)
    correction = RolloutCorrectionSpec(rollout_is="token", rollout_is_threshold=50.0) if choice == "token" else None
    objective = PolicyObjective(
        LossSpec(policy="reinforce" if choice == "token" else "ppo_clip", clip_ratio_high=50.0),
        1.0,
        available=columns.keys(),
        correction=correction,
        old_is_rollout=choice == "old",
        needs_entropy=False,
    )
    batch = Batch(returned.rows, columns)
    weights, totals = objective.token_weights(batch)
    current = torch.full((count,), -0.5, dtype=torch.float64, requires_grad=True)
    tokens = ResponseTokens(
        logprob=current,
        entropy=None,
        weight=torch.from_numpy(weights.values).double() / totals[0],
        columns={name: torch.from_numpy(np.copy(columns[name].values)).double() for name in objective.columns},
        row=torch.from_numpy(np.repeat(np.arange(len(batch)), np.diff(offsets))),
        totals=totals,
    )
    loss, _ = objective(tokens)
    loss.backward()
    assert current.grad is not None
    # The gradient of -mean(r A) is -r / tokens, with r = exp(current - log-prob under which it was sampled, in step 1).
    sampled = np.array([value for row in range(4) for value in (-1, -row)])
    np.testing.assert_allclose(current.grad.numpy(), -np.exp(-0.5 - sampled) / count, rtol=1e-6)
