"""Rollouts of several turns on a server: each response goes on by itself, and knows all that was said before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from completions import ENDS
from work import context_of

from dagrl.config.schema import ModelSpec, Pipeline
from dagrl.data.batch import Batch, Column
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.ops.base import OpInput
from dagrl.ops.response import passages
from dagrl.ops.rollout import rollout

pytestmark = pytest.mark.slow

INIT = {"model_type": "qwen3"}
TOKENIZER = {"kind": "characters", "alphabet": "0123456789+="}
PROMPTS = ("1+1=", "1+1=", "2+3=", "2+3=", "10+7=", "10+7=")
PATIENCE = '''
import threading

import dagrl

others_done = threading.Event()
calls = []

def every_turn(text):
    return [("wait_for_others", {})]

@dagrl.tool
def wait_for_others(*, extra_info: dict) -> str:
    """The first row's first call is answered once the others have had all of theirs."""
    calls.append(extra_info["row"])
    if sum(row != 0 for row in calls) >= 10:
        others_done.set()
    if extra_info["row"] == 0 and calls.count(0) == 1:
        assert others_done.wait(60), "the others have waited for it"
    return "=7="

def every_turn_at_once(text):
    return [("answer", {})]

@dagrl.tool
def answer() -> str:
    """Say the same."""
    return "=7="
'''
PATIENT = {"tools": ["patience:wait_for_others"], "tool_format": "patience:every_turn"}
SHORT = {"tools": ["patience:answer"], "tool_format": "patience:every_turn_at_once", "max_turn_tokens": 2}
# Half of the characters end a turn, so that turns are short.
ENDING = range(3, 10)
STOPS = {"tokens": {"stop_token_ids": [*ENDING]}, "texts": {"stop": [*"0123456"]}}


def played(server: Any, backend: str, folder: Path, options: dict[str, Any], sampling: dict[str, Any]) -> Batch:
    """A rollout of `PROMPTS`, two to a group, in three turns at most."""
    drawn = {"max_new_tokens": 200, **sampling}
    node = {"op": "rollout", "engine": "generator", "n": 2, "sampling": drawn, "max_turns": 3, **options}
    pipeline = Pipeline.model_validate(
        {
            "name": "turns",
            "model": {"init": INIT, "tokenizer": TOKENIZER},
            "data": {"train": "train.parquet", "prompts_per_step": 3, "max_prompt_tokens": 8},
            "groups": {"rollout": {"cpus_per_node": 1}},
            "engines": {"generator": {"backend": backend, "group": "rollout"}},
            "nodes": {"rollout": node, "reward": {"op": "reward", "fn": "exact"}},
            "run": {"steps": 1},
        }
    )
    (folder / "patience.py").write_text(PATIENCE)
    tokenizer = load_tokenizer(ModelSpec.model_validate({"init": INIT, "tokenizer": TOKENIZER}))
    rows = np.arange(len(PROMPTS), dtype=np.int64)
    columns = {
        "group_id": Column(rows // 2),
        "prompt_tokens": Column.ragged([tokenizer.encode(prompt) for prompt in PROMPTS], "int64"),
        "extra_info": Column.text([f'{{"row": {row}}}' for row in rows]),
    }
    context = context_of(pipeline, folder, "rollout", server, shards=1, sampled_by="rollout")
    outputs = rollout([OpInput(0, Batch(rows, columns))], context)
    return Batch.concat([Batch(output.rows, output.columns) for output in outputs]).in_order(rows)


@pytest.mark.parametrize("stops", STOPS)
def test_responses_continue_independently_from_their_earlier_tokens(
    server, server_backend, model_of, tmp_path: Path, stops: str
) -> None:
    whole = played(server, server_backend, tmp_path, PATIENT, STOPS[stops])
    assert whole["turns"].values.tolist() == [3] * len(PROMPTS)
    tokenizer = load_tokenizer(ModelSpec.model_validate({"init": INIT, "tokenizer": TOKENIZER}))
    for row in range(len(PROMPTS)):
        said = passages(whole, row)
        assert [each.turn for each in said] == [1, 0, 2, 0, 3]
        assert all(tokenizer.decode(each.tokens) == "=7=" for each in said if not each.turn)
        assert all(ended_at(each.tokens) == len(each.tokens) for each in said if each.turn)
        prompt, response = tokenizer.encode(PROMPTS[row]), whole["response_tokens"][row]
        tokens = torch.tensor([*prompt, *response.tolist()])
        with torch.no_grad():
            logprobs = model_of(5)(tokens[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt), len(tokens))
        expected = logprobs[places - 1, tokens[places]].numpy() * whole["response_mask"][row]
        np.testing.assert_allclose(whole["rollout_logprob"][row], expected, atol=1e-4)


@pytest.mark.parametrize("stops", STOPS)
def test_a_turn_that_reaches_its_limit_without_an_end_is_the_last(
    server, server_backend, tmp_path: Path, stops: str
) -> None:
    whole = played(server, server_backend, tmp_path, SHORT, STOPS[stops])
    for row, reason in enumerate(whole["finish_reason"].strings()):
        turns = [each.tokens for each in passages(whole, row) if each.turn]
        cut = [len(tokens) == 2 and ended_at(tokens) is None for tokens in turns]
        assert all(ended_at(tokens) == len(tokens) for tokens, is_cut in zip(turns, cut, strict=True) if not is_cut)
        assert not any(cut[:-1]) and reason == ("length" if cut[-1] else "turns")
        assert cut[-1] or len(turns) == 3


def ended_at(tokens: np.ndarray) -> int | None:
    """The number of tokens up to the first that ends a turn."""
    return next((place for place, token in enumerate(tokens, 1) if token in (*ENDING, *ENDS)), None)
