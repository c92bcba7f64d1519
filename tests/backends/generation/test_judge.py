"""The judge's op and a validation of several responses, on every engine that generates."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from work import context_of

from dagrl.config.schema import ModelSpec, Pipeline
from dagrl.data.batch import Batch, Column
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.ops.base import Context, OpInput
from dagrl.ops.judge import judge
from dagrl.ops.rollout import rollout

pytestmark = pytest.mark.slow

ROWS, TOKENS = 6, 5
MODEL = {
    "init": {"model_type": "qwen3"},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789+="},
}


def graded(reply):
    """Another score for each reply."""
    return sum((ord(character) % 31) / 32 ** (place + 1) for place, character in enumerate(reply))


@pytest.fixture
def context(engine, backend: str, tmp_path: Path):
    """``context(node, validation)`` of a node on this engine."""
    greedy = {"temperature": 0.0, "max_new_tokens": TOKENS}
    nodes: dict[str, Any] = {
        "rollout": {
            "op": "rollout",
            "engine": "generator",
            "n": 2,
            "sampling": {"max_new_tokens": 4},
            "val_sampling": {"max_new_tokens": TOKENS, "ignore_eos": True},
            "val_n": 3,
        },
        "reward": {
            "op": "judge",
            "engine": "generator",
            "prompt": "{prompt}{response}",
            "parser": "own_judge:graded",
            "sampling": greedy,
            "max_prompt_tokens": 100,
        },
    }
    pipeline = Pipeline.model_validate(
        {
            "name": "judge",
            "model": MODEL,
            "data": {"train": "train.parquet", "prompts_per_step": 3, "max_prompt_tokens": 8},
            "groups": {"rollout": {"cpus_per_node": 1}},
            "engines": {"generator": {"backend": backend, "group": "rollout"}},
            "nodes": nodes,
            "run": {"steps": 1},
        }
    )
    (tmp_path / "own_judge.py").write_text(inspect.getsource(graded))

    def make(node: str, *, validation: bool = False) -> Context:
        return context_of(pipeline, tmp_path, node, engine, validation=validation, shards=1, sampled_by="rollout")

    return make


def test_a_score_is_that_of_the_engines_own_reply(context, model_of) -> None:
    rows = np.arange(ROWS, dtype=np.int64)
    responses = [np.array([3 + row, 4 + row], dtype=np.int64) for row in rows]
    columns = {
        "messages": Column.text([f'[{{"role": "user", "content": "{row}+{row}="}}]' for row in rows]),
        "answer": Column.text([""] * ROWS),
        "data_source": Column.text(["sums"] * ROWS),
        "response_tokens": Column.ragged(responses, "int64"),
    }
    (output,) = judge([OpInput(0, Batch(rows, columns))], context("reward"))
    tokenizer = load_tokenizer(ModelSpec.model_validate(MODEL))
    expected = []
    for row, response in zip(rows, responses, strict=True):
        question = f"{row}+{row}={tokenizer.decode(response)}"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        reply = likeliest(model_of(5), tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        expected.append(graded(tokenizer.decode(reply, skip_special_tokens=True)))
    np.testing.assert_allclose(output.columns["reward"].values, expected, atol=1e-6)
    assert len(set(expected)) > 2, "it does not say the same of all"


def likeliest(model: Any, prompt: list[int], eos: int) -> list[int]:
    """The reply of transformers alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + TOKENS and (len(tokens) == len(prompt) or tokens[-1] != eos):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_validation_samples_by_its_own_parameters(context) -> None:
    rows = np.arange(ROWS, dtype=np.int64)
    columns = {
        "group_id": Column(rows // 3),
        "prompt_tokens": Column.ragged([np.array([4 + row // 3, 13]) for row in rows], "int64"),
    }
    outputs = list(rollout([OpInput(0, Batch(rows, columns))], context("rollout", validation=True)))
    whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs]).in_order(rows)
    said = [tuple(whole["response_tokens"][row]) for row in rows]
    assert {len(each) for each in said} == {TOKENS}
    assert len(set(said[:3])) > 1, "each response draws by its own seed"
