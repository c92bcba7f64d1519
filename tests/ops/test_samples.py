"""The sink: what one can read of a step's samples, and under which name."""

from __future__ import annotations

from typing import Any

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from dagrl.ops.base import OpInput
from dagrl.ops.samples import samples
from dagrl.reporting.run_data.sample_view import sample_view


def part_of(bench, **more: Any) -> OpInput:
    batch = bench.batch(
        [0, 1, 2],
        group_id=[0, 0, 1],
        prompt_tokens=["1+1=", "1+1=", "1+2="],
        reward=[1, 0, 0.5],
        answer=["2", "2", "3"],
        data_source=["sums", "sums", "Größe"],
        **{"response_tokens": ["2", [1], "34"], "data_set": ["train"] * 3, **more},
    )
    return OpInput(0, batch)


def written(bench) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file that is there."""
    return {path.name: pq.read_table(path).to_pylist() for path in (bench.folder / "run" / "samples").iterdir()}


def test_samples_are_written_as_text_with_their_tokens(bench) -> None:
    (output,) = samples([part_of(bench)], bench.context(step=12))
    assert (output.rows.tolist(), output.columns) == ([0, 1, 2], {})
    assert (output.stats["reward"].mean, output.stats["reward"].count) == (0.5, 3)
    assert (output.stats["response_tokens"].total, output.stats["response_tokens"].high) == (4, 2)
    assert "response_tokens/cut_fraction" not in output.stats
    assert (output.stats["prompt_tokens"].mean, output.stats["prompt_tokens"].high) == (4, 4)
    rows = written(bench)["step_12.parquet"]
    assert rows[0] == {
        "sample_id": 0,
        "group_id": 0,
        "data_set": "train",
        "data_source": "sums",
        "prompt": "1+1=",
        "response": "2",
        "answer": "2",
        "reward": 1.0,
        "response_tokens": bench.tokenizer.encode("2"),
    }
    assert [row["sample_id"] for row in rows] == [0, 1, 2]
    assert [row["response"] for row in rows] == ["2", "<eos>", "34"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5]
    assert rows[2]["data_source"] == "Größe"


def test_several_sources_have_metrics_of_their_own(bench) -> None:
    train = {"sums": "a.parquet", "code": "b.parquet", "unseen": "c.parquet"}
    part = part_of(bench, data_set=["sums", "code", "sums"], finish_reason=["stop", "length", "stop"])
    (output,) = samples([part], bench.context(data={"train": train, "val_pass_reward": 0.75}))
    found = {name: stat for name, stat in output.stats.items() if name.startswith("train/")}
    assert {name.split("/")[1] for name in found} == {"sums", "code"}, "no number stands for no samples"
    assert found["train/sums/reward"].mean == 0.75
    assert (found["train/sums/pass_rate"].mean, found["train/code/pass_rate"].mean) == (0.5, 0)
    assert (found["train/sums/response_tokens"].mean, found["train/sums/response_tokens"].high) == (1.5, 2)
    assert found["train/sums/prompt_tokens"].count == 2
    assert found["train/code/response_tokens/cut_fraction"].mean == 1
    assert output.stats["reward"].mean == 0.5
    (alone,) = samples([part_of(bench)], bench.context(data={"train": {"sums": "a.parquet"}}))
    assert not [name for name in alone.stats if name.startswith("train/")]


def test_advantages_and_versions_are_written_where_there_are_any(bench) -> None:
    part = part_of(bench, advantage=[[0.5, 1.5], [], [-1.0]], policy_version=[4, 4, 3])
    list(samples([part], bench.context()))
    rows = written(bench)["step_1.parquet"]
    assert [row["advantage"] for row in rows] == [1.0, 0.0, -1.0]
    assert [row["policy_version"] for row in rows] == [4, 4, 3]


def test_why_responses_ended_is_written_and_counted(bench) -> None:
    (output,) = samples([part_of(bench, finish_reason=["stop", "length", "stop"])], bench.context())
    assert output.stats["response_tokens/cut_fraction"].mean == 1 / 3
    assert (output.stats["reward/cut_mean"].total, output.stats["reward/cut_mean"].count) == (0, 1)
    rows = written(bench)["step_1.parquet"]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "stop"]


def test_further_numbers_of_a_reward_are_columns(bench) -> None:
    list(
        samples(
            [part_of(bench, reward_info=['{"acc": 1.0, "why": "right"}', "{}", '{"acc": 0.0, "len": 2}'])],
            bench.context(),
        )
    )
    rows = written(bench)["step_1.parquet"]
    assert [(row["reward_info/acc"], row["reward_info/len"]) for row in rows] == [(1, None), (None, None), (0, 2)]


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (2, 2), (64, 3)])
def test_only_the_first_rows_are_written(bench, limit: int, count: int) -> None:
    (output,) = samples([part_of(bench)], bench.context(run={"samples_per_step": limit}))
    rows = written(bench)["step_1.parquet"]
    assert [row["prompt"] for row in rows] == ["1+1=", "1+1=", "1+2="][:count]
    assert len(output.rows) == 3, "all rows are done, written or not"


def test_no_samples_are_written_where_none_are_wanted(bench) -> None:
    (output,) = samples([part_of(bench)], bench.context(run={"samples_per_step": 0}))
    assert len(output.rows) == 3
    assert not (bench.folder / "run").exists()


def test_validation_has_a_file_of_its_own(bench) -> None:
    list(samples([part_of(bench)], bench.context(step=3)))
    list(samples([part_of(bench, data_set=["val"] * 3)], bench.context(step=3, validation=True, data={"val": "v"})))
    assert set(written(bench)) == {"step_3.parquet", "step_3_val.parquet"}


def test_the_first_rows_of_each_validation_set_are_written(bench) -> None:
    part = part_of(bench, data_set=["sums", "sums", "sizes"])
    context = bench.context(
        validation=True, data={"val": {"sums": "a", "sizes": "b"}}, run={"steps": 1, "samples_per_step": 1}
    )
    list(samples([part], context))
    rows = written(bench)["step_1_val.parquet"]
    assert [(row["sample_id"], row["data_set"]) for row in rows] == [(0, "sums"), (2, "sizes")]


def test_a_step_done_again_replaces_its_file_in_one_go(bench, monkeypatch) -> None:
    list(samples([part_of(bench)], bench.context()))
    before = (bench.folder / "run" / "samples" / "step_1.parquet").read_bytes()

    def torn(writer: pq.ParquetWriter, table: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(pq.ParquetWriter, "write_table", torn)
        list(samples([part_of(bench)], bench.context()))
    assert (bench.folder / "run" / "samples" / "step_1.parquet").read_bytes() == before
    list(samples([part_of(bench, policy_version=[1, 1, 1])], bench.context()))
    assert list(written(bench)) == ["step_1.parquet"]
    assert "policy_version" in written(bench)["step_1.parquet"][0]


def test_a_full_disk_is_an_error_that_names_the_file(bench) -> None:
    folder = bench.folder / "run" / "samples"
    folder.mkdir(parents=True)
    (folder / ".step_12.parquet").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*/step_12\.parquet: No space left on device$"):
        list(samples([part_of(bench)], bench.context(step=12)))


def test_several_turns_are_written_as_a_conversation(bench) -> None:
    part = part_of(bench, token_turn=[[1], [1], [1, 2]], token_reward=[[0.5], [0.0], [0.25, 1.0]])
    list(samples([part], bench.context()))
    rows = written(bench)["step_1.parquet"]
    assert [row["turns"] for row in rows] == [
        [{"turn": 1, "text": "2", "reward": 0.5}],
        [{"turn": 1, "text": "", "reward": 0.0}],
        [{"turn": 1, "text": "3", "reward": 0.25}, {"turn": 2, "text": "4", "reward": 1.0}],
    ]
    list(samples([part_of(bench, token_turn=[[1], [1], [1, 0]])], bench.context()))
    turns = written(bench)["step_1.parquet"][2]["turns"]
    assert turns == [{"turn": 1, "text": "3", "reward": None}, {"turn": None, "text": "4", "reward": None}]


@pytest.mark.parametrize("said", [["", "", ""], ["", "2", ""], [[1], "", "3"]], ids=str)
def test_files_of_empty_responses_are_read_together_with_others(bench, said: list) -> None:
    for step, responses in enumerate((said, ["2", [1], "34"], said), start=1):
        lengths = [len(each) for each in responses]
        ragged = {
            name: [[1.0] * each for each in lengths]
            for name in ("advantage", "old_logprob", "token_turn", "token_reward", "token_version")
        }
        infos = ['{"steps": 2}', "{}", "{}"] if responses is not said else ['{"steps": null}'] * 3
        part = part_of(bench, reward_info=infos, **{"response_tokens": responses, **ragged})
        (output,) = samples([part], bench.context(step=step))
        assert output.stats["response_tokens"].total == sum(lengths)
    folder = bench.folder / "run" / "samples"
    table = pyarrow.dataset.dataset(folder).to_table()
    assert [len(each) for each in table["response_tokens"].to_pylist()[:3]] == [len(each) for each in said]
    assert [row["response"] for row in sample_view(bench.folder / "run", 1, validation=False)] == [
        "<eos>" if each == [1] else each for each in said
    ]


def test_log_probs_are_written_with_the_text_of_each_token(bench) -> None:
    logprobs = {"rollout_logprob": [[-0.5], [-1.0], [-2.0, -3.0]], "old_logprob": [[-0.25], [-1.0], [-2.5, -3.0]]}
    list(samples([part_of(bench, token_turn=[[1], [1], [1, 0]], **logprobs)], bench.context()))
    rows = written(bench)["step_1.parquet"]
    assert [row["token_text"] for row in rows] == [["2"], ["<eos>"], ["3", "4"]]
    assert [row["rollout_logprob"] for row in rows] == logprobs["rollout_logprob"]
    assert [row["old_logprob"] for row in rows] == logprobs["old_logprob"]
    assert rows[2]["token_turn"] == [1, 0]
    list(samples([part_of(bench)], bench.context(step=2)))
    assert "token_text" not in written(bench)["step_2.parquet"][0]
