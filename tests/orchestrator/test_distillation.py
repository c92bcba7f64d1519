"""A student learns from teachers: real sampling, the teachers' log-probs and gradients through Megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.tokenizer import make_tokenizer

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
DEMO = yaml.safe_load((REPOSITORY / "dag_templates" / "tiny_grpo.yaml").read_text())
SUMS = [(left, right) for left in range(5) for right in range(5)]
STEPS_OF_GRPO = 50
"""Steps in which the demo's GRPO, with four times the samples a step, answers all sums right: 50 to 80; its samples are
right in nine of ten cases after 60 to 65 (docs/distillation.md)."""
CHOICE = 'def of_ones(data_source): return [name == "ones" for name in data_source]\n'


def make_teacher(folder: Path, more: int) -> None:
    """Train a model of the demo's shape to answer sums with a number that is `more`, and save it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(TokenizerSpec(**DEMO["model"]["tokenizer"]))
    texts = [tokenizer.encode(f"{left}+{right}={left + right + more}") for left, right in SUMS]
    tokens = torch.tensor([[*text, tokenizer.eos_token_id] for text in texts])
    torch.manual_seed(more)
    shape = {key: value for key, value in DEMO["model"]["init"].items() if key != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    answers = tokens[:, 4:]
    for _ in range(100):
        logits = model(tokens[:, :-1]).logits[:, 3:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(tokens[:, :-1]).logits[:, 3:].argmax(-1) == answers).all(), "the teacher knows all sums"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(path: Path, more: int) -> None:
    """Sums with small first operands, or the other ones with answers that are 1 more."""
    rows = [
        {
            "data_source": "ones" if more else "sums",
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "reward_model": {"style": "rule", "ground_truth": str(left + right + more)},
        }
        for left, right in SUMS
        if (left > 1) == bool(more)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def student_of_two() -> dict[str, Any]:
    """The demo's student; each teacher scores the tokens of the rows of its source."""
    files = {"sums": "sums.parquet", "ones": "ones.parquet"}
    scored, merged = {"op": "logprob", "top_k": 15}, {"op": "merge", "engine": None, "top_k": None}
    return {
        "extends": "tiny_distill",
        "name": "student",
        "data": {"train": files, "val": files},
        "engines": {
            "teacher": None,
            "sums": {"backend": "megatron", "group": "train", "model": {"path": "sums"}},
            "ones": {"backend": "megatron", "group": "train", "model": {"path": "ones"}},
        },
        "nodes": {
            "sums": {**scored, "engine": "sums", "rows": {"data_set": ["sums"]}, "write": "sums_logprob"},
            "ones": {**scored, "engine": "ones", "rows": "choice:of_ones", "write": "ones_logprob"},
            "teacher": {**merged, "columns": ["sums_topk_ids", "ones_topk_ids"], "write": "teacher_topk_ids"},
            "merged": {
                "op": "merge",
                "columns": ["sums_topk_logprob", "ones_topk_logprob"],
                "write": "teacher_topk_logprob",
            },
        },
        "run": {"steps": STEPS_OF_GRPO // 3, "validate_every": STEPS_OF_GRPO // 3, "save_every": None},
        "track": ["console"],
    }


def test_a_student_of_two_teachers_soon_answers_as_each_of_them(lab, tmp_path: Path) -> None:
    for name, more in (("sums", 0), ("ones", 1)):
        make_teacher(tmp_path / name, more)
        write_prompts(tmp_path / f"{name}.parquet", more)
    (tmp_path / "choice.py").write_text(CHOICE)
    path = tmp_path / "student.yaml"
    path.write_text(yaml.safe_dump(student_of_two(), sort_keys=False))
    run = lab.start(path, tmp_path / "run")
    assert run.wait() == 0, run.output
    first, *steps = run.metrics()
    for source in ("sums", "ones"):
        assert first[f"val/{source}/mean@1"] < 0.3
        assert steps[-1][f"val/{source}/mean@1"] > 0.9, "the teacher's answers are all right"
        assert steps[-1][f"train/{source}/reward/mean"] > 0.8, "so are most samples of the student"
    assert steps[-1]["distillation/loss"] < 0.1 * steps[0]["distillation/loss"]
