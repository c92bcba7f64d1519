"""What learns from the data set's responses: what reaches the engine, and what validation tells."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from work import context_of, work_of

from dagrl.algorithms.dpo import DpoObjective
from dagrl.algorithms.sft import SftObjective
from dagrl.config.schema import Pipeline
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat, merge
from dagrl.ops.base import Context, OpInput
from dagrl.ops.dpo import dpo
from dagrl.ops.logprob import logprob
from dagrl.ops.prompts import prompts
from dagrl.ops.samples import samples
from dagrl.ops.sft import sft
from dagrl.ops.work import SourceWork


class Engine:
    """Notes what it trains on; gives the n-th row's tokens the log-prob -1 / (n + 1)."""

    policy_version = 3

    def update(self, mini_batches: list[Batch], objective: Any, **options: Any) -> dict[str, Stat]:
        self.trained_on = [(batch.rows.tolist(), batch["response_tokens"].lengths.tolist()) for batch in mini_batches]
        self.objective, self.options = objective, options
        return {"grad_norm": Stat.of([0.5])}

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        assert (temperature, tokens_per_micro_batch) == (1.0, 99)
        rows = zip(batch.rows, batch["response_tokens"].lengths, strict=True)
        return Column.ragged([[-1 / (row + 1)] * length for row, length in rows], "float32")


DATA = {"responses": ["chosen", "rejected"], "max_response_tokens": 4}


def batch_of(bench, rows: list[int], said: list[list[int]]) -> Batch:
    batch = bench.batch(rows, prompt_tokens=["1="] * len(rows), response_tokens=said)
    return Batch(batch.rows, {"prompt_tokens": batch["prompt_tokens"], "demonstration": batch["response_tokens"]})


def offline(bench, engine: Any = None, *, validation: bool = False, **node: Any) -> Context:
    """The context of a node of a pipeline that has no other, and no rollout."""
    declared = bench.pipeline({}).model_dump(exclude_unset=True)
    declared["data"] |= {**DATA, "train": bench.folder / "train.parquet"}
    declared["nodes"] = {"node": {"engine": "actor", "tokens_per_micro_batch": 99, **node}}
    pipeline = Pipeline.model_validate(declared)
    return context_of(pipeline, bench.folder, "node", engine, validation=validation)


def test_sft_trains_on_demonstrations_once_an_epoch(bench) -> None:
    engine = Engine()
    parts = [OpInput(0, batch_of(bench, [0, 1], [[3], [4, 5]])), OpInput(1, batch_of(bench, [], []))]
    (output,) = sft(parts, offline(bench, engine, op="sft", epochs=2, aggregation="seq-mean-token-mean"))
    assert engine.trained_on == [([0, 1], [1, 2]), ([], [])] * 2
    assert engine.options == {"tokens_per_micro_batch": 99, "begins": True, "ends": True}
    assert isinstance(engine.objective, SftObjective)
    assert (engine.objective.aggregation, engine.objective.longest_response) == ("seq-mean-token-mean", 4)
    assert (output.rows.tolist(), output.stats["grad_norm"].mean) == ([0, 1], 0.5)


def test_dpo_hands_its_options_on(bench) -> None:
    engine = Engine()
    context = offline(bench, engine, op="dpo", beta=0.3, loss="ipo", sft_coef=0.1)
    list(dpo([OpInput(0, batch_of(bench, [0, 1], [[3], [4, 5]]))], context))
    objective = engine.objective
    assert isinstance(objective, DpoObjective)
    assert (objective.form, objective.beta, objective.label_smoothing, objective.sft_coef) == ("ipo", 0.3, 0.0, 0.1)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token-mean", (1 + 2 / 2 + 3 / 3) / 6), ("seq-mean-token-mean", (1 + 1 / 2 + 1 / 3) / 3)],
)
def test_validation_reports_the_mean_over_all_ranks_rows(bench, aggregation: str, expected: float) -> None:
    shares = [batch_of(bench, [0, 2], [[3], [4, 5, 6]]), batch_of(bench, [1], [[4, 5]]), batch_of(bench, [], [])]
    told = []
    for share in shares:
        engine = Engine()
        (output,) = sft([OpInput(0, share)], offline(bench, engine, validation=True, op="sft", aggregation=aggregation))
        assert not hasattr(engine, "trained_on")
        told.append(output.stats)
    assert merge(told)["loss/sft"].mean == pytest.approx(expected)


def test_validation_of_pairs(bench) -> None:
    engine = Engine()
    batch = batch_of(bench, [0, 1, 2, 3], [[3], [4, 5], [3, 4], [5]])
    reference = Column.ragged([[-1.0], [-1.0, -1.0], [0.0, 0.0], [0.0]], "float32")
    batch = batch.with_columns({"ref_logprob": reference, "group_id": Column(np.array([0, 0, 1, 1]))})
    (output,) = dpo([OpInput(0, batch)], offline(bench, engine, op="dpo", validation=True, beta=1.0))
    # Log-ratios 0 and 1 in the first pair, -2/3 and -1/4 in the second.
    assert output.stats["dpo/accuracy"].mean == 0.0
    assert output.stats["dpo/margin"].mean == pytest.approx((-1 - 5 / 12) / 2)
    losses = [math.log(1 + math.exp(1)), math.log(1 + math.exp(5 / 12))]
    assert output.stats["loss/dpo"].mean == pytest.approx(sum(losses) / 2)
    assert output.stats["loss/dpo"].count == 2
    (nothing,) = dpo(
        [OpInput(0, batch.take(np.array([], dtype=np.int64)))],
        offline(bench, engine, op="dpo", validation=True, beta=1.0),
    )
    assert merge([output.stats, nothing.stats]) == output.stats, "a rank without pairs has nothing to tell"


def test_log_probs_of_demonstrations_are_of_unscaled_logits(bench) -> None:
    scored = bench.batch([0], prompt_tokens=["1="], response_tokens=[[3, 4]])
    (output,) = logprob([OpInput(0, scored)], offline(bench, Engine(), op="logprob"))
    assert output.columns["logprob"].values.tolist() == [-1.0, -1.0]


def test_rows_of_a_prompt_take_its_responses_in_turn(bench, texts) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), bench.folder / "train.parquet")
    context = replace(offline(bench, op="dpo"), work=work_of(SourceWork, "prompts", node=None, prompts=(0, 1, 2, 3)))
    outputs = list(prompts([], context))
    batch = Batch.concat([Batch(output.rows, output.columns) for output in outputs])
    assert texts(batch["demonstration"]) == [f"{text}<eos>" for n in range(4) for text in (str(n + 1), "0")]
    assert batch["group_id"].values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch["answer"].strings() == [""] * 8
    assert {output.uncounted for output in outputs} == {()}, "a row is as long as its demonstration makes it"


def test_samples_of_a_step_without_a_rollout_are_the_demonstrations(bench) -> None:
    batch = bench.batch(
        [0, 1],
        group_id=[0, 0],
        prompt_tokens=["1=", "1="],
        response_tokens=["1", "23"],
        answer=["", ""],
        data_source=["", ""],
        data_set=["train", "train"],
    )
    columns = {**batch.columns, "demonstration": batch["response_tokens"]}
    del columns["response_tokens"]
    (output,) = samples([OpInput(0, Batch(batch.rows, columns))], offline(bench, op="sft"))
    assert output.stats["demonstration_tokens"].mean == 1.5
    assert "reward" not in output.stats
    written = pq.read_table(bench.folder / "run" / "samples" / "step_1.parquet").to_pylist()
    assert [row["demonstration"] for row in written] == ["1", "23"]
    assert "response" not in written[0]
