"""A small pipeline, and what an op is given to work on: contexts and batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from work import context_of

from dagrl.config.schema import Pipeline, TokenizerSpec
from dagrl.data.batch import Batch, Column
from dagrl.model_files.tokenizer import make_tokenizer
from dagrl.ops.base import Context

ALPHABET = "0123456789+="
TOKENIZER = make_tokenizer(TokenizerSpec(kind="characters", alphabet=ALPHABET))
QUESTIONS = ("1+1=", "1+2=", "1+3=", "2+2=", "2+3=")


def declaration() -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {"init": {"model_type": "qwen3"}, "tokenizer": {"kind": "characters", "alphabet": ALPHABET}},
        "data": {"train": "train.parquet", "prompts_per_step": 4, "max_prompt_tokens": 8},
        "groups": {"train": {"cpus_per_node": 1}, "rollout": {"cpus_per_node": 1}},
        "engines": {
            "actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-3}},
            "generator": {"backend": "hf", "group": "rollout", "weights_from": "actor"},
        },
        "nodes": {
            "rollout": {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 3}},
            "reward": {"op": "reward", "fn": "exact"},
            "old": {"op": "logprob", "engine": "actor", "write": "old_logprob"},
            "advantage": {"op": "advantage", "estimator": "grpo"},
            "update": {"op": "update", "engine": "actor"},
        },
        "run": {"steps": 6, "seed": 3},
    }


class Bench:
    """Makes what ops work on, in a folder of its own."""

    tokenizer = TOKENIZER
    questions = QUESTIONS

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_prompts(self, name: str, questions: tuple[str, ...] = QUESTIONS) -> Path:
        """A file with these questions; the answers are their numbers in the file."""
        rows = [
            {
                "data_source": f"source {number}",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"index": number},
            }
            for number, question in enumerate(questions)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / name)
        return self.folder / name

    def write_module(self, name: str, text: str) -> None:
        """A module of the user's beside the pipeline file."""
        (self.folder / f"{name}.py").write_text(text)

    def pipeline(self, edits: dict[str, dict[str, Any]]) -> Pipeline:
        """The small pipeline with other values of some keys; of a node, the whole of it."""
        declared = declaration()
        for section, values in edits.items():
            declared[section] = {**declared.get(section, {}), **values}
        return Pipeline.model_validate(declared)

    def context(
        self,
        node: str | None = None,
        *,
        engine: Any = None,
        step: int = 1,
        validation: bool = False,
        shards: int = 2,
        **edits: Any,
    ) -> Context:
        """The context of a node, by its name, of the small pipeline with `edits`: sections, or fields of its work."""
        fields = {key: edits.pop(key) for key in ("prompts", "frozen", "averaged") if key in edits}
        fields |= {"step": step, "validation": validation, "shards": shards}
        return context_of(self.pipeline(edits), self.folder, node, engine, **fields)

    @staticmethod
    def batch(rows: list[int], **columns: Any) -> Batch:
        """A batch of these columns: strings as text, or as tokens where the column holds such; lists as they are."""
        return Batch(np.array(rows, dtype=np.int64), {name: _column(name, values) for name, values in columns.items()})


def _column(name: str, values: list[Any]) -> Column:
    if name.endswith("_tokens"):
        return Column.ragged([TOKENIZER.encode(each) if isinstance(each, str) else each for each in values], "int64")
    if name in ("answer", "data_source", "extra_info", "finish_reason", "data_set", "messages", "reward_info"):
        return Column.text(values)
    if name in ("group_id", "policy_version"):
        return Column(np.array(values, dtype=np.int64))
    if name == "reward":
        return Column(np.array(values, dtype=np.float32))
    return Column.ragged(values, "float32")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def clean_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench that no test writes files with, for hypothesis to use again and again."""
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def texts() -> Callable[[Column], list[str]]:
    """The texts of a column of tokens."""
    return lambda column: [TOKENIZER.decode(column[row]) for row in range(len(column))]
