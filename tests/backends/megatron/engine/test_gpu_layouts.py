"""Every layout on GPUs equals one GPU: see `gpu_layouts`, which runs all cases of a number of GPUs in one go."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_cases import CASES
from gpu_verdicts import judged

SCRIPT = Path(__file__).parents[3] / "helpers" / "gpu_layouts.py"


def run(ranks: int, out: Path, *arguments: str, **environment: str) -> dict[str, dict[str, Any]]:
    """What each run showed, by case and precision."""
    command = [sys.executable, SCRIPT, "--ranks", str(ranks), "--out", out, *arguments]
    done = subprocess.run(command, text=True, capture_output=True, env=os.environ | environment, timeout=1500)
    print(done.stdout)
    results = out / f"layouts_{ranks}.jsonl"
    assert results.exists(), done.stderr[-4000:]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return {f"{line['case']} {line['precision']}": line for line in lines}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_equals_one_gpu(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    results = run(ranks, tmp_path)
    assert results.keys() == {
        f"{case.name} {precision}" for case in CASES[ranks] for precision in case.precisions(on_gpu=True)
    }
    problems = {name: line["problem"] for name, line in results.items() if line["problem"] is not None}
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


def test_the_names_of_the_cases_tell_them_apart() -> None:
    for cases in CASES.values():
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.slow
@pytest.mark.soak
def test_a_layout_is_compared_without_gpus_too(tmp_path: Path) -> None:
    results = run(2, tmp_path, "--only", "dense-tp2-sp", CUDA_VISIBLE_DEVICES="")
    assert results.keys() == {"dense-tp2-sp fp32"}
    line = results["dense-tp2-sp fp32"]
    assert line["problem"] is None
    assert 0 < line["worst_gradient"] <= 1e-5 and 0 < line["logprob"] <= 1e-5


@pytest.fixture
def measured() -> dict[str, Any]:
    """Ten tensors' gradients, log-probs and weights, as `gpu_layouts` measures them."""
    random = np.random.default_rng(1)
    return {
        "logprobs": random.normal(size=1000),
        "ranks_agree": True,
        "gradients": {f"layer.{i}": torch.from_numpy(random.normal(size=(40, 30))) for i in range(10)},
        "weights": {f"layer.{i}": torch.full((3,), float(i)) for i in range(10)},
    }


def rounded(measured: dict[str, Any], seed: int, size: float = 4e-3, **changes: Any) -> dict[str, Any]:
    """The same with relative errors of that size, drawn at random."""
    random = np.random.default_rng(seed)

    def off(values: Any) -> Any:
        factor = 1 + size * random.normal(size=tuple(values.shape))
        return values * (factor if isinstance(values, np.ndarray) else torch.from_numpy(factor))

    gradients = {name: off(tensor) for name, tensor in measured["gradients"].items()}
    return measured | {"logprobs": off(measured["logprobs"]), "gradients": gradients} | changes


def test_rounding_is_within_the_bounds_and_mistakes_are_not(measured: dict[str, Any]) -> None:
    noisy = rounded(measured, 1)
    assert judged(rounded(measured, 2), measured, noisy, mixture=False)["problem"] is None
    mistakes: dict[str, dict[str, Any]] = {}
    for name, factor in {"doubled": 2.0, "averaged": 0.98, "not a number": float("nan"), "missing": 0.0}.items():
        broken = rounded(measured, 2)
        broken["gradients"]["layer.3"] = broken["gradients"]["layer.3"] * factor
        mistakes[name] = broken
    mistakes["one token"] = rounded(measured, 2, logprobs=noisy["logprobs"] + 1.0 * (np.arange(1000) == 500))
    mistakes["ranks"] = rounded(measured, 2, ranks_agree=False)
    mistakes["export"] = rounded(measured, 2, weights=measured["weights"] | {"layer.2": torch.full((3,), 2.0001)})
    fewer = {name: tensor for name, tensor in measured["gradients"].items() if name != "layer.5"}
    mistakes["lost"] = rounded(measured, 2, gradients=fewer)
    for name, broken in mistakes.items():
        assert judged(broken, measured, noisy, mixture=False)["problem"] is not None, name


def test_float32_has_a_bound_of_its_own(measured: dict[str, Any]) -> None:
    assert judged(rounded(measured, 2, 1e-7), measured, None, mixture=False)["problem"] is None
    assert judged(rounded(measured, 2, 1e-4), measured, None, mixture=False)["problem"] is not None
