"""Plans of the cases of benchmarks/plan_accuracy.py against runs of them on H200s: `docs/plan.md` lists them.

Memory within 10 %, steps and their nodes within 20 %. Other runs were under way on other GPUs of the host, but for
those that nothing was fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.megatron.section import ParallelSpec
from dagrl.planner.showing.report import report

FIGURES = (
    *("memory/update_peak_gib", "driver/update_gib", "driver/rollout_gib"),
    *("time/step_s", "time/rollout_s", "time/old_s", "time/update_s", "sleep actor", "wake actor"),
)
MEASURED: dict[str, tuple[float | None, ...]] = {
    "1.7b_turns": (66.8, 75.1, 40.4, 15.34, 6.93, 1.74, 5.37, 0.609, 0.518),
    # Its last step was cut off, and with it the driver's count.
    "1.7b_recompute": (37.8, None, None, 16.76, 7.00, 1.73, 6.78, None, None),
    "1.7b_offload": (47.5, 55.9, 40.4, 16.90, 7.13, 2.28, 7.03, None, None),
    "1.7b_apart": (66.8, 72.6, 72.6, 13.85, 6.82, 1.72, 5.26, None, None),
    "1.7b_dp2": (57.1, 65.2, 38.4, 10.32, 4.30, 1.08, 3.41, 0.905, 0.311),
    "1.7b_pp2": (48.2, 55.3, 39.6, 11.46, 4.78, 1.32, 3.68, 0.940, 0.360),
    # Of its log-probs, whose layers wait for the host, it had 2.4 s; see below.
    "1.7b_tp2": (33.5, 41.9, 23.9, 14.34, 6.24, None, 4.28, 0.895, 0.305),
    "8b_tp2": (110.2, 118.7, 34.6, 27.95, 8.35, 4.18, 11.97, 1.727, 1.171),
    "8b_pp2_recompute": (78.4, 86.8, 64.7, 31.76, 7.98, 4.51, 15.82, 1.729, 1.162),
}
"""Case -> the most GiB of the fullest rank and GPU, and medians of seconds."""
KEPT: dict[str, list[tuple[float | None, ...]]] = {
    "1.7b_dp2": [
        (57.1, 65.8, 40.6, 9.06, 4.27, 0.942, 2.85, 0.467, 0.299),
        (57.1, 65.8, 40.6, 9.01, 4.27, 0.946, 2.82, 0.430, 0.296),
    ],
    "1.7b_tp2": [(33.5, 41.8, 24.9, 12.90, 5.29, 2.12, 4.60, 0.442, 0.268)],
}
"""Later runs, with nothing beside them, whose communicators stayed as they do by default. Nothing was fitted to what
their nodes took. Since then they have, with older runs, told what a trainer's first move down takes on two GPUs, and
what its communicators and a sleeping server hold."""
QUIET = (33.5, 41.9, 23.9, 12.21, 5.01, 1.71, 3.90, 0.88, 0.27)
"""1.7b_tp2 earlier that day, with one test beside it."""
SHORT: dict[str, tuple[float | None, ...]] = {
    "1.7b_turns": (None, 69.9, 32.4, 10.6, 4.15, 1.30, 4.02, 0.53, 0.49),
    "1.7b_together": (None, 98.1, 98.1, 9.54, 4.25, 1.33, 3.95, None, None),
}
"""Responses of 512 tokens, whose micro-batches are not full: their peaks are below a plan's."""


LONE_GIB = 0.53
"""Of a communicator that the older runs' trainers had for a group of one rank, and left on the GPU."""


def lone_communicators(case: Any) -> int:
    """How many they had: all ranks meet in two groups, replicas in two others."""
    replicas = ParallelSpec(**case.parallel).data_parallel_size(case.gpus)
    return 2 * (case.gpus == 1) + 2 * (replicas == 1)


@pytest.fixture(scope="module")
def planned(benchmark_module, tmp_path_factory) -> Callable[..., dict[str, float]]:
    """``planned(case, response_tokens, keeps)``: what a machine with H200s is told of it, and what those runs held
    beside that which did not keep their communicators.
    """
    accuracy = benchmark_module("plan_accuracy")
    folder: Path = tmp_path_factory.mktemp("cases")

    def figures(name: str, response_tokens: int, keeps: bool) -> dict[str, float]:
        case = accuracy.CASES[name]
        case = replace(case, load=replace(case.load, response_tokens=response_tokens))
        (folder / "config.json").write_text(json.dumps(accuracy.MODELS[case.model]))
        file = folder / "pipeline.yaml"
        with pytest.MonkeyPatch.context() as on_gpus:
            on_gpus.setattr("torch.cuda.is_available", lambda: True)
            on_gpus.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
            pipeline = accuracy.pipeline_of(name, case, folder, folder / "prompts.parquet")
            pipeline["engines"]["actor"]["keep_communicators"] = keeps
            # These runs used SGLang's sampler.
            pipeline["engines"]["generator"].setdefault("server", {})["sampling_backend"] = "flashinfer"
            file.write_text(json.dumps(pipeline))
        with pytest.MonkeyPatch.context() as then:
            # Log-probs were computed shard by shard.
            then.setattr("dagrl.scheduler.placement._waits_for_all", lambda *_: False)
            told = accuracy.planned_figures(report(file, ()), case.load)
        if not keeps:
            left = LONE_GIB * lone_communicators(case)
            told |= {what: told[what] + left for what in ("driver/update_gib", "driver/rollout_gib")}
        return told

    return figures


RUNS = [
    *((case, 768, False, figures) for case, figures in MEASURED.items()),
    ("1.7b_tp2", 768, False, QUIET),
    *((case, 512, False, figures) for case, figures in SHORT.items()),
    *((case, 768, True, figures) for case, runs in KEPT.items() for figures in runs),
]


@pytest.mark.parametrize(("case", "response_tokens", "keeps", "measured"), RUNS)
def test_a_plan_is_near_its_run(
    planned, case: str, response_tokens: int, keeps: bool, measured: tuple[float | None, ...]
) -> None:
    told = planned(case, response_tokens, keeps)
    for what, figure in zip(FIGURES, measured, strict=True):
        if figure is not None:
            assert told[what] == pytest.approx(figure, rel=0.1 if what.endswith("_gib") else 0.2), what
