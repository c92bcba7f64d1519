"""Real questions, the math reward, and what goes through the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.soak

REPOSITORY = Path(__file__).parents[2]
ORIGINALS = REPOSITORY.parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def gsm8k_run(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    originals = ORIGINALS if ORIGINALS.is_dir() else _a_handful_of_rows(folder / "originals")
    command = [sys.executable, "data_preprocess/gsm8k.py", "--local_dir", folder, "--source", originals]
    subprocess.run([str(each) for each in command], check=True, cwd=REPOSITORY, timeout=300)
    run = lab.start(
        REPOSITORY / "dag_templates" / "tiny_gsm8k.yaml",
        folder / "run",
        f"data.train={folder / 'train.parquet'}",
        f"data.val={folder / 'test.parquet'}",
    )
    assert run.wait() == 0, run.output
    return run


def _a_handful_of_rows(folder: Path) -> Path:
    folder.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        rows = [
            f'{{"question": "Ann has {n} apples and buys {n} more. How many has she?", '
            f'"answer": "She has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n} apples.\\n#### {2 * n}"}}'
            for n in range(2, 40)
        ]
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


def test_three_steps_on_real_questions(gsm8k_run):
    metrics = gsm8k_run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(0 <= line["reward/mean"] <= 1 and line["grad_norm"] >= 0 for line in metrics)
    assert "val/reward/mean" in metrics[-1]
    assert metrics[0]["kl/ref"] == pytest.approx(0, abs=1e-6)
    samples = pq.read_table(gsm8k_run.folder / "samples" / "step_1.parquet").to_pylist()
    assert len(samples) == 64
    data = pq.read_table(gsm8k_run.folder.parent / "train.parquet")["prompt"].to_pylist()
    assert {sample["prompt"] for sample in samples} <= {messages[0]["content"] for messages in data}


def test_the_driver_sees_metadata_only(gsm8k_run):
    for line in gsm8k_run.metrics()[:2]:
        samples = 16 * 4
        tokens = line["throughput/tokens_per_s"] * line["time/step_s"]
        # Prompts and responses alone, not counting what is computed for each token.
        bulk = tokens * np.dtype(np.int64).itemsize
        assert line["driver/bytes"] < 1024 * samples
        assert line["driver/bytes"] < bulk / 3


def test_tensorboard_and_offline_wandb_files_are_written(gsm8k_run):
    assert list((gsm8k_run.folder / "tensorboard").rglob("events.out.tfevents.*"))
    assert list((gsm8k_run.folder).rglob("*.wandb"))


def test_nothing_is_left_behind(gsm8k_run):
    assert gsm8k_run.left_behind() == []
