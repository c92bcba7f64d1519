"""A small pipeline that is right, in a folder of its own, to be broken by each test in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.errors import PipelineError, Problem
from dagrl.validation import check_file

BASE = """\
name: tiny
model:
  init: {model_type: qwen3, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, intermediate_size: 128}
  tokenizer: {kind: characters, alphabet: "0123456789+= "}
data:
  train: train.parquet
  prompts_per_step: 8
  max_prompt_tokens: 16
groups:
  train: {cpus_per_node: 2}
  rollout: {cpus_per_node: 1}
engines:
  actor:
    backend: megatron
    group: train
    optimizer: {lr: 1e-3}
  reference: {backend: megatron, frozen_copy_of: actor}
  generator: {backend: hf, group: rollout, weights_from: actor}
nodes:
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}
run: {steps: 10}
"""
ROW = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2", "style": "rule"}}


@dataclass(frozen=True)
class Project:
    """A folder with ``p.yaml`` and ``train.parquet``."""

    folder: Path

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write_rows(self, name: str, rows: list[dict]) -> Path:
        pq.write_table(pa.Table.from_pylist(rows), self.folder / name)
        return self.folder / name

    def pipeline(self, *edits: tuple[str, str]) -> Path:
        """``p.yaml`` with some text replaced by other text."""
        text = BASE
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the pipeline"
            text = text.replace(old, new)
        return self.write("p.yaml", text)

    def problems(self, path: Path, *overrides: str) -> list[Problem]:
        with pytest.raises(PipelineError) as caught:
            check_file(path, overrides)
        return list(caught.value.problems)

    def only_problem(self, path: Path, *overrides: str) -> Problem:
        problems = self.problems(path, *overrides)
        assert len(problems) == 1, "\n".join(map(str, problems))
        return problems[0]

    def assert_problem(self, path: Path, place: str, code: str, *named: str) -> None:
        """The pipeline has one problem: at `place`, in the line marked ``#!``, of this kind, naming these words."""
        marked = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if "#!" in line]
        problem = self.only_problem(path)
        assert [problem.line] == marked, str(problem)
        assert (problem.file, problem.place) == (str(path), place)
        assert_code(problem, code, *named)

    def warnings(self, *edits: tuple[str, str]) -> list[tuple[str, str]]:
        """Places and codes of the warnings about the edited pipeline."""
        return [(warning.place, warning.code) for warning in check_file(self.pipeline(*edits)).warnings]


def assert_code(problem: Problem, code: str, *named: str) -> None:
    """The problem is of this kind (a code, or a part of its message), names these words, and has a remedy."""
    assert code == problem.code or code in problem.message, f"{problem.code}: {problem}"
    for word in named:
        assert word in problem.message
    assert "; " in problem.message, "no word on what to do"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write_rows("train.parquet", [ROW] * 32)
    project.pipeline()
    return project


@pytest.fixture
def row() -> dict:
    return dict(ROW)


@pytest.fixture
def base() -> str:
    return BASE
