"""All that is sampled comes from SGLang's servers on the CPU: turns with a tool, several responses in validation, and a
judge's replies. By hand, before a release: two servers take a minute to start, and six GiB.
"""

from __future__ import annotations

import inspect
from functools import cache

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.model_files.tokenizer import load_tokenizer

pytestmark = pytest.mark.soak

DIGITS, SEED, TOKENS = "0123456789+=", 3, 4
QUESTION = "what is {response} of {prompt}"


def calls(text):
    """A turn with a plus in it is an expression."""
    return [("calculator", {"expression": text})] if "+" in text else []


def graded(reply):
    """Another score for each reply."""
    return sum((ord(character) % 31) / 32 ** (place + 1) for place, character in enumerate(reply))


JUDGE = ModelSpec.model_validate(
    {
        "init": {
            "model_type": "qwen3",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            # Far from uniform: no two tokens are nearly as likely.
            "initializer_range": 0.3,
        },
        "tokenizer": {"kind": "characters", "alphabet": f"{DIGITS} abcdefghijklmnopqrstuvwxyz"},
    }
)


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang_judge")
    pipeline = lab.tiny_pipeline()
    pipeline["groups"]["judges"] = {"cpus_per_node": 1}
    pipeline["engines"]["generator"] = {"backend": "sglang", "group": "rollout", "weights_from": "actor"}
    pipeline["engines"]["wise"] = {
        "backend": "sglang",
        "group": "judges",
        "model": JUDGE.model_dump(exclude_unset=True),
    }
    pipeline["nodes"]["rollout"] |= {
        "tools": ["calculator"],
        "tool_format": "own:calls",
        "max_turns": 3,
        "max_observation_tokens": 4,
        "sampling": {"max_new_tokens": 20},
        "val_sampling": {"max_new_tokens": 20, "temperature": 1.0},
        "val_n": 4,
    }
    pipeline["nodes"]["reward"] = {
        "op": "judge",
        "engine": "wise",
        "prompt": QUESTION,
        "parser": "own:graded",
        "sampling": {"temperature": 0.0, "max_new_tokens": TOKENS},
        "max_prompt_tokens": 200,
    }
    pipeline["run"] |= {"steps": 2, "save_every": None, "validate_every": 2, "seed": SEED, "samples_per_step": 64}
    path = lab.write_pipeline(folder, pipeline)
    (folder / "own.py").write_text("\n\n".join(map(inspect.getsource, (calls, graded))))
    run = lab.start(path, folder / "run")
    assert run.wait() == 0, run.output
    return run


def samples(run, step: str) -> list[dict]:
    return pq.read_table(run.folder / "samples" / f"step_{step}.parquet").to_pylist()


def test_the_policy_is_trained_on_its_own_turns(run) -> None:
    assert [line["step"] for line in run.metrics()] == [1, 2]
    for line in run.metrics():
        assert line["staleness/max"] == 0
        assert line["mismatch/logprob_diff/max"] < 1e-4, "over all turns the server saw what the trainer sees"
        assert 1 < line["turns/mean"] <= line["turns/max"] <= 3
        assert line["grad_norm"] > 0
    assert run.left_behind() == []


def test_a_validation_has_several_responses_to_each_prompt(run) -> None:
    last = run.metrics()[-1]
    assert last["val/worst@4"] < last["val/mean@4"] < last["val/best@4"]
    rows = samples(run, "2_val")
    groups = [{row["response"] for row in rows[first : first + 4]} for first in range(0, len(rows), 4)]
    assert len(rows) == 64 and any(len(group) > 1 for group in groups)


@pytest.mark.parametrize("step", ["1", "2", "2_val"])
def test_a_score_is_what_the_judges_own_model_says(run, step: str) -> None:
    scores = set()
    for row in samples(run, step):
        last = [turn["text"] for turn in row["turns"] if turn["turn"]][-1]
        reply = said(QUESTION.format(response=last, prompt=row["prompt"]))
        assert row["reward"] == pytest.approx(graded(reply), abs=1e-6), reply
        scores.add(row["reward"])
    assert len(scores) > 4, "it does not say the same of all"


@cache
def said(question: str) -> str:
    """The likeliest reply, by transformers alone."""
    model, tokenizer = judge()
    tokens = tokenizer.encode(question)
    begin = len(tokens)
    while len(tokens) < begin + TOKENS and tokens[-1] != tokenizer.eos_token_id:
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokenizer.decode(tokens[begin:], skip_special_tokens=True)


@cache
def judge():
    model = AutoModelForCausalLM.from_config(load_hf_config(JUDGE), dtype=torch.float32).eval()
    source = weight_source(JUDGE, SEED)
    replace_weights(model, [(name, source.get(name)) for name in source.names()])
    return model, load_tokenizer(JUDGE)
