"""SmolLM2-135M-Instruct on text of GSM8K: log-probs of transformers in any layout, and conversion to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

ROWS = Path(__file__).parents[3] / "helpers" / "gsm8k_rows.jsonl"
"""Questions of GSM8K's test set with their solutions (MIT, openai/grade-school-math)."""
BOUND = 1e-4


@pytest.fixture(scope="module")
def solutions(smollm2: Path) -> "Batch":
    """Questions and their solutions in the chat template: more than 2,000 tokens of responses."""
    from transformers import AutoTokenizer

    from dagrl.data.batch import Batch, Column

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts, responses = [], []
    for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines()):
        chat = [{"role": "user", "content": row["question"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text))
        responses.append(tokenizer.encode(row["answer"] + tokenizer.eos_token))
    assert sum(map(len, responses)) > 2000
    return Batch(
        np.arange(len(prompts)),
        {
            "prompt_tokens": Column.ragged([np.array(ids) for ids in prompts], "int64"),
            "response_tokens": Column.ragged([np.array(ids) for ids in responses], "int64"),
        },
    )


@pytest.fixture(scope="module")
def expected(smollm2: Path, solutions: "Batch") -> np.ndarray:
    """Log-probs of all responses by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    found = []
    for row in range(len(solutions)):
        prompt, response = (solutions.columns[name][row] for name in ("prompt_tokens", "response_tokens"))
        tokens = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        log_p = torch.log_softmax(logits, dim=-1)
        found.append(log_p.gather(1, tokens[0, len(prompt) :, None]).squeeze(1).numpy())
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("ranks", "parallel", "rows"),
    [
        pytest.param(1, {}, 15, id="packed"),
        # Nine heads and three key heads. Several micro-batches, too.
        pytest.param(3, {"tensor_model_parallel_size": 3}, 9, id="tp3"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, 9, id="pp2"),
    ],
)
def test_logprobs_are_those_of_transformers(
    run_engine: Callable[..., list[Any]],
    smollm2: Path,
    solutions: "Batch",
    expected: np.ndarray,
    ranks: int,
    parallel: dict[str, int],
    rows: int,
) -> None:
    from dagrl.config.schema import ModelSpec

    def on_rank(engine: Any) -> np.ndarray:
        column = engine.logprobs(solutions.take(np.arange(rows)), temperature=1.0, tokens_per_micro_batch=1536)
        return np.concatenate([column[row] for row in range(rows)])

    model = ModelSpec.model_validate({"path": str(smollm2)})
    answers = run_engine(ranks, on_rank, model=model, parallel=parallel, trainable=False)
    for found in answers:
        assert len(found) > 1000
        assert np.abs(found - expected[: len(found)]).max() <= BOUND


def test_it_comes_back_from_megatrons_format_to_the_bit(smollm2: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from dagrl.cli import main

    assert main(["convert", str(smollm2), "-o", str(tmp_path / "megatron"), "--to", "megatron"]) == 0
    back = ["convert", str(tmp_path / "megatron"), "-o", str(tmp_path / "hf"), "--to", "hf", "--model", str(smollm2)]
    assert main(back) == 0
    published, converted = (load_file(folder / "model.safetensors") for folder in (smollm2, tmp_path / "hf"))
    assert converted.keys() == published.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in published.items())
