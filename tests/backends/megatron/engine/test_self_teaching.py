"""A policy that copies what it is told, and cannot add, teaches itself to add: by its own average, told the sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weighted_likelihood import WeightedLikelihood

from dagrl.config.schema import LossSpec, ModelSpec
from dagrl.data.batch import Batch, Column

ALPHABET = "0123456789+="
END, FIRST, VOCAB = 1, 3, 3 + len(ALPHABET)
SUMS = [(left, right) for left in range(5) for right in range(5)]
PLAIN = [f"{left}+{right}=" for left, right in SUMS]
TOLD = [f"{left + right}={left}+{right}=" for left, right in SUMS]
ANSWERS = np.array([[FIRST + left + right, END] for left, right in SUMS])
EACH = 16
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
OPTIMIZER = {"lr": 2e-3, "adam_beta2": 0.95, "weight_decay": 0.0, "clip_grad": 1.0}
BUDGET = 1 << 14


def batch_of(prompts: list[str], responses: np.ndarray, **columns: Column) -> Batch:
    """Responses of two tokens after these prompts, trained up to the end token."""
    tokens = [[FIRST + ALPHABET.index(character) for character in prompt] for prompt in prompts]
    mask = np.ones(responses.shape)
    mask[:, 1] = responses[:, 0] != END
    own = {
        "prompt_tokens": Column.ragged(tokens, "int64"),
        "response_tokens": Column.ragged(list(responses), "int64"),
        "response_mask": Column.ragged(list(mask), "float32"),
    }
    return Batch(np.arange(len(prompts)), {**own, **columns})


def distributions(engine: Any, prompts: list[str], responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, likeliest first, and their log-probs at both tokens, [rows, 2, vocabulary]."""
    from dagrl.backends.base import TokenOutputs

    batch = batch_of(prompts, responses)
    found = engine.token_outputs(batch, TokenOutputs(top_k=VOCAB), temperature=1.0, tokens_per_micro_batch=BUDGET)
    return tuple(found[name].values.reshape(len(prompts), 2, VOCAB) for name in ("topk_ids", "topk_logprob"))


def sampled(engine: Any, prompts: list[str], random: np.random.Generator) -> np.ndarray:
    responses = np.full((len(prompts), 2), END)
    for place in range(2):
        ids, logprobs = distributions(engine, prompts, responses)
        drawn = (logprobs[:, place] + random.gumbel(size=(len(prompts), VOCAB))).argmax(-1)
        responses[:, place] = ids[np.arange(len(prompts)), place, drawn]
    return responses


def share_right(engine: Any, prompts: list[str]) -> float:
    ids, _ = distributions(engine, prompts, ANSWERS)
    return float((ids[:, :, 0] == ANSWERS).all(1).mean())


def teach(engine: Any, steps: int) -> None:
    """Jensen-Shannon divergence from the teacher at the student's eight likeliest tokens, as SDPO."""
    from dagrl.algorithms.objective import PolicyObjective
    from dagrl.backends.base import TokenOutputs

    loss = LossSpec.model_validate({"policy": "none", "distillation": {"divergence": "jsd"}})
    objective = PolicyObjective(loss, 1.0, ["teacher_topk_ids", "teacher_topk_logprob"])
    random, prompts = np.random.default_rng(1), [prompt for prompt in PLAIN for _ in range(EACH)]
    for _ in range(steps):
        responses = sampled(engine, prompts, random)
        ids, _ = distributions(engine, prompts, responses)
        offsets = np.arange(0, 2 * len(prompts) + 1, 2)
        likeliest = Column(ids[:, :, :8].reshape(-1, 8).astype(np.int32), offsets)
        told = batch_of([prompt for prompt in TOLD for _ in range(EACH)], responses, likeliest=likeliest)
        with engine.average_weights():
            outputs = TokenOutputs(at="likeliest")
            teacher = engine.token_outputs(told, outputs, temperature=1.0, tokens_per_micro_batch=BUDGET)
        taught = {f"teacher_{name}": teacher[name] for name in ("topk_ids", "topk_logprob")}
        engine.update([batch_of(prompts, responses, **taught)], objective, tokens_per_micro_batch=BUDGET)


def test_the_policy_learns_from_its_average_that_is_told_more(run_engine, tmp_path: Path) -> None:
    model = ModelSpec.model_validate({"init": MODEL, "tokenizer": {"kind": "characters", "alphabet": ALPHABET}})
    schedule = {"lr_decay_style": "linear", "lr_warmup_steps": 5, "min_lr": 1e-4}
    options: dict[str, Any] = {"model": model, "optimizer": OPTIMIZER, "lr_schedule": schedule}

    def copy(engine: Any) -> tuple[float, float]:
        weights = {
            "advantage": Column.ragged([[1.0, 1.0]] * len(SUMS), "float32"),
            "reward": Column(np.zeros(len(SUMS), dtype=np.float32)),
        }
        objective = WeightedLikelihood(needs_entropy=False, temperature=1.0)
        for _ in range(150):
            engine.update([batch_of(TOLD, ANSWERS, **weights)], objective, tokens_per_micro_batch=BUDGET)
        engine.save(tmp_path / "start")
        return share_right(engine, TOLD), share_right(engine, PLAIN)

    def learn(engine: Any) -> tuple[float, float]:
        before = share_right(engine, PLAIN)
        teach(engine, 30)
        return before, share_right(engine, PLAIN)

    ((told, alone),) = run_engine(1, copy, **options, train_steps=150)
    start = {"dist_checkpointing_path": tmp_path / "start", "moving_average": 0.01}
    ((before, after),) = run_engine(1, learn, **options, **start, train_steps=30)
    assert told == 1.0
    assert alone == pytest.approx(before) and before <= 0.4
    assert after >= 0.8
