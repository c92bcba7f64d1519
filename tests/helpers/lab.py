"""Real runs of a tiny pipeline, as a user starts them: `dagrl run` in a process of its own, real Ray, real engines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dagrl.tracking.metrics_file import ENDS, accounts

RUN_TIMEOUT_S = 600
_MEASURED = ("time/", "throughput/", "driver/", "mfu/", "memory/", "sync/", "run/", "samples/lost", "tokens/lost")

REWARDS = '''
import time

import dagrl


@dagrl.reward(batched=True)
def unhurried(response, answer):
    """Exact comparison that takes a moment, so that its overlap with other nodes can be seen."""
    time.sleep(0.1)
    return [float(said == right) for said, right in zip(response, answer)]


def even(response):
    """For half of what untrained weights say, whatever its length: something to be learned from the first step on."""
    return float(response[:1] in "02468")


def fails_on(response, answer, prompt, trouble):
    if prompt == trouble:
        raise KeyError("this reward knows no " + trouble)
    return float(response == answer)
'''


def tiny_pipeline() -> dict[str, Any]:
    """Additions of one digit, a two-layer Qwen3, GRPO on two CPU slots."""
    return {
        "name": "tiny",
        "model": {
            "init": {
                "model_type": "qwen3",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 32,
                "tie_word_embeddings": False,
            },
            "tokenizer": {"kind": "characters", "alphabet": "0123456789+="},
        },
        "data": {"train": "train.parquet", "val": "train.parquet", "prompts_per_step": 8, "max_prompt_tokens": 8},
        "groups": {"train": {"cpus_per_node": 1}, "rollout": {"cpus_per_node": 1}},
        "engines": {
            "actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-3}},
            "reference": {"backend": "megatron", "frozen_copy_of": "actor"},
            # Batches smaller than a shard, so that a shard is finished while the next is sampled.
            "generator": {"backend": "hf", "group": "rollout", "weights_from": "actor", "max_batch_size": 4},
        },
        "nodes": {
            "rollout": {"op": "rollout", "engine": "generator", "n": 4, "sampling": {"max_new_tokens": 3}},
            "reward": {"op": "reward", "fn": "rewards:unhurried"},
            "old": {"op": "logprob", "engine": "actor", "write": "old_logprob"},
            "ref": {"op": "logprob", "engine": "reference", "write": "ref_logprob"},
            "advantage": {"op": "advantage", "estimator": "grpo"},
            "update": {"op": "update", "engine": "actor", "mini_batch": 4, "loss": {"kl_coef": 0.01}},
        },
        "schedule": {"shards_per_step": 2},
        "run": {"steps": 6, "seed": 3, "save_every": 2, "validate_every": 3, "start_timeout_s": 500},
        "track": ["console"],
    }


def write_pipeline(folder: Path, pipeline: dict[str, Any]) -> Path:
    """Put a pipeline, its data and its rewards into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "addition",
            "prompt": [{"role": "user", "content": f"{left}+{right}="}],
            "reward_model": {"style": "rule", "ground_truth": str(left + right)},
            "extra_info": {"index": left * 4 + right},
        }
        for left in range(4)
        for right in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "rewards.py").write_text(REWARDS)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return path


class Run:
    """One `dagrl run`, under way or over."""

    def __init__(self, pipeline: Path, folder: Path, *overrides: str, ray_address: str | None = None) -> None:
        self.folder = folder
        # Short, for Ray puts sockets into it.
        self.temporary = Path(tempfile.mkdtemp(prefix="dt", dir="/tmp"))
        self._output = folder.with_suffix(".out")
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["TMPDIR"] = str(self.temporary)
        if ray_address:
            environment |= {"RAY_ADDRESS": ray_address, "RAY_AUTH_MODE": "disabled"}
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dagrl", "run", str(pipeline), "--run-dir", str(folder), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        check_accounts(lines)
        return lines

    def wait_for_step(self, step: int, within_s: float = RUN_TIMEOUT_S) -> None:
        """Until that step is in the metrics."""
        deadline = time.monotonic() + within_s
        while not any(line["step"] >= step for line in self.metrics()):
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output}"
            assert time.monotonic() < deadline, f"no step {step} within {within_s} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, limit_s: float = RUN_TIMEOUT_S) -> int:
        """Its exit code."""
        return self.process.wait(timeout=limit_s)

    def kill(self) -> None:
        """SIGKILL to the driver alone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self) -> list[str]:
        """What is left of the run after a moment to end: processes that use its temporary folder, and what is in it."""
        deadline = time.monotonic() + 60
        while (left := [*self._processes(), *map(str, self.temporary.iterdir())]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _processes(self) -> list[str]:
        """Processes that were started with the temporary folder, or have a file of it open: all that belong to Ray."""
        mark = str(self.temporary)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                opened = [str(each.readlink()) for each in (folder / "fd").iterdir()]
            except OSError:
                continue
            if mark in command or any(mark in each for each in opened):
                found.append(f"{folder.name} {command[:100]}")
        return found


def check_accounts(lines: list[dict[str, Any]]) -> None:
    """Each sample and each token has one end, in every step and over the run."""
    for line in lines:
        for name in [name for name in line if name.endswith(("samples/generated", "tokens/generated"))]:
            part = name.removesuffix("generated")
            came = [line.get(part + end, 0) for end in ("generated", "carried_in")]
            went = [line.get(part + end, 0) for end in (*ENDS, "carried_out")]
            assert sum(came) == sum(went) and min(*came, *went) >= 0, (part, line)
    for each in accounts(lines):
        for counts in (each.samples, each.tokens):
            assert min(counts.values()) >= 0, each
            assert counts["generated"] == sum(count for end, count in counts.items() if end != "generated"), each


def comparable(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those that measure time or memory, or count restarts and what they lost."""
    return [{name: value for name, value in line.items() if not name.startswith(_MEASURED)} for line in metrics]


class Lab:
    """Makes pipelines and runs them."""

    tiny_pipeline = staticmethod(tiny_pipeline)
    write_pipeline = staticmethod(write_pipeline)
    comparable = staticmethod(comparable)

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def call(self, *arguments: object, at: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Call `dagrl` in a process of its own, in the working directory or another, and wait for it."""
        with tempfile.TemporaryDirectory(prefix="dt", dir="/tmp") as temporary:
            environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
            return subprocess.run(
                [sys.executable, "-m", "dagrl", *map(str, arguments)],
                env=environment | {"TMPDIR": temporary},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
                cwd=at,
            )

    def start(self, pipeline: Path, folder: Path, *overrides: str, ray_address: str | None = None) -> Run:
        """Start `dagrl run` in the background."""
        self.runs.append(Run(pipeline, folder, *overrides, ray_address=ray_address))
        return self.runs[-1]


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab whose runs, those still under way, are killed at the end of the session."""
    lab = Lab()
    yield lab
    for run in lab.runs:
        if run.process.poll() is None:
            run.kill()
        shutil.rmtree(run.temporary, ignore_errors=True)


@pytest.fixture(scope="session")
def unbroken(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The tiny pipeline from its first step to its last, in one go."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = lab.start(write_pipeline(folder, tiny_pipeline()), folder / "run")
    assert run.wait() == 0, run.output
    return run


@pytest.fixture(scope="session")
def on_one_slot(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first three steps of the tiny pipeline with both engines on one group, some nodes profiled and recorded.

    One run for all of it: each would show in the numbers.
    """
    folder = tmp_path_factory.mktemp("one_slot")
    pipeline = tiny_pipeline()
    pipeline["engines"]["generator"]["group"] = "train"
    del pipeline["groups"]["rollout"]
    pipeline["run"] = {"steps": 3, "seed": 3, "validate_every": 3, "record": {"nodes": ["update"], "keep_last": 1}}
    pipeline["profile"] = {"steps": [2, 3], "nodes": ["rollout", "ref", "update"], "with_stack": True}
    run = lab.start(write_pipeline(folder, pipeline), folder / "run")
    assert run.wait() == 0, run.output
    return run
