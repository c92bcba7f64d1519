"""A real run on two sources of different formats, with their own numbers of responses, sampling, reward and filter."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

STEPS = 3


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("sources")
    pipeline = lab.tiny_pipeline()
    lines = [json.dumps({"question": f"{row}+{row}=", "answer": 2 * row}) for row in range(5)]
    (folder / "sharp.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    columns = {"prompt_key": "question", "answer_key": "answer"}
    sharp = {"path": "*.jsonl.gz", **columns, "n": 2, "sampling": {"max_new_tokens": 2, "temperature": 0.4}}
    pipeline["data"] |= {"train": {"usual": "train.parquet", "sharp": sharp}, "val": None}
    nodes = pipeline["nodes"]
    nodes["rollout"] |= {"n": 5, "over_sampling_batch_size": 10, "partial_rollout": True}
    own = {"usual": {"fn": "rewards:even"}, "sharp": {"fn": "exact"}}
    nodes["reward"] = {"op": "reward", "by_source": own}
    passes = {"usual": {"lower": -1}, "sharp": {"lower": -2}}
    nodes["keep"] = {"op": "filter", "lower": 9, "by_source": passes, "max_rounds": 1}
    pipeline["run"] |= {"steps": STEPS, "save_every": STEPS, "validate_every": None}
    path = lab.write_pipeline(folder, pipeline)
    run = lab.start(path, folder / "run")
    assert run.wait() == 0, run.output
    return run


@pytest.fixture(scope="module")
def samples(run) -> list[list[dict[str, Any]]]:
    """The rows of each step."""
    folder: Path = run.folder / "samples"
    return [pq.read_table(folder / f"step_{step}.parquet").to_pylist() for step in range(1, STEPS + 1)]


def test_each_prompt_has_the_responses_of_its_source(samples) -> None:
    for rows in samples:
        groups = Counter((row["group_id"], row["data_set"]) for row in rows)
        assert len(groups) == 8
        assert {name for _, name in groups} == {"usual", "sharp"}
        assert all(count == {"usual": 5, "sharp": 2}[name] for (_, name), count in groups.items())
        assert max(len(row["response_tokens"]) for row in rows if row["data_set"] == "sharp") <= 2


def test_rows_are_those_of_their_source(samples) -> None:
    for row in (row for rows in samples for row in rows):
        left, right = row["prompt"].removesuffix("=").split("+")
        assert row["answer"] == str(int(left) + int(right))
        assert row["data_source"] == {"usual": "addition", "sharp": "sharp"}[row["data_set"]]
        assert left == right or row["data_set"] == "usual"


def test_each_response_is_scored_by_the_function_of_its_source(samples) -> None:
    for row in (row for rows in samples for row in rows):
        said = row["response"].removesuffix("<eos>")
        expected = said[:1] in "02468" if row["data_set"] == "usual" else said == row["answer"]
        assert row["reward"] == float(expected)


def test_the_trainer_divides_the_logits_of_each_row_by_the_temperature_that_sampled_it(run) -> None:
    """Float32 on both sides: another temperature would be seen in the first digit."""
    for line in run.metrics():
        assert line["mismatch/logprob_diff/max"] < 1e-4


def test_metrics_of_sources_add_up_to_those_of_the_step(run, samples) -> None:
    for line, rows in zip(run.metrics(), samples, strict=True):
        counts = Counter(row["data_set"] for row in rows)
        for name in ("reward/mean", "response_tokens/mean", "response_tokens/cut_fraction", "prompt_tokens/mean"):
            total = sum(counts[source] * line[f"train/{source}/{name}"] for source in counts)
            assert total / len(rows) == pytest.approx(line[name]), name
        for name in [name for name in line if name.startswith(("samples/", "tokens/"))]:
            assert line[name] == sum(line.get(f"train/{source}/{name}", 0) for source in ("usual", "sharp")), name
        assert line["train/sharp/samples/trained"] == counts["sharp"]
        assert line["train/sharp/response_tokens/max"] <= 2 < 3 == line["train/usual/response_tokens/max"]
        assert line["train/usual/pass_rate"] == pytest.approx(line["train/usual/reward/mean"])
        # No group passes the bounds of the node itself.
        assert line["train/sharp/kept_fraction"] == line["train/usual/kept_fraction"] == 1
        low, high = sorted(line[f"train/{source}/entropy"] for source in counts)
        assert low < line["entropy"] < high
        # A cold distribution is the more certain one.
        assert low == line["train/sharp/entropy"]
