"""Whether advice of `dagrl why` holds: run a pipeline, follow its advice, and compare what was said with what it gains.

    python benchmarks/why.py --out FOLDER [--case NAME ...]

Real runs on CPU slots whose slow parts sleep, so that other load on the machine matters little; `cores` and
`micro_batch` compute instead, and need two idle cores. `turns` needs a GPU, on which trainer and server take turns.
Times are those of usual steps, by `dagrl why` for both runs.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from dagrl_run import ROOT, DagrlRun
from reports import Verdict, tell
from timed_steps import Shape

from dagrl.data.prompt_file import PromptRow, write_prompts
from dagrl.reporting.why.explain import Explanation, explain

MOST_OFF = 0.25
"""Largest error, as a share of the saved time."""
_LIMIT_S = 900.0
_NO_EXTRAS = ("run.save_every=1000", "run.validate_every=null", "run.validate_first=false", "track=[console]")


@dataclass(frozen=True, slots=True)
class Case:
    """A pipeline with something slow, and which advice is followed."""

    pipeline: dict[str, Any]
    follow: dict[str, tuple[str, ...]]
    """Beginning of the advice's key -> overrides that follow it; none: the key is the override."""
    steps: int = 14
    module: tuple[str, ...] = ("dagrl",)
    timings: Shape | None = None
    """Engines that only wait."""
    rollout_s: float = 1.2
    """Seconds of a rollout on these engines."""
    computes: bool = False
    """Whether cores are what its time goes to."""
    gpus: int = 0


SHAPE = Shape(generators=1, trainers=1, shards=4, prompts=32, n=4, response_tokens=8)
DEMO = {"extends": str(ROOT / "dag_templates" / "tiny_grpo.yaml")}

_LARGER = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
_SERVER = {"backend": "sglang", "group": "train", "max_batch_size": None, "server": {"max_total_tokens": 65536}}


def _engines() -> dict[str, Any]:
    pipeline = SHAPE.pipeline("prompts.parquet", 14)
    # Old log-probs of the rollout, so that the update may begin before its end.
    pipeline["nodes"]["update"] |= {"mini_batch": 8, "read": {"old_logprob": "rollout_logprob"}}
    return pipeline


def _straggling() -> dict[str, Any]:
    """One of 64 responses waits for its environment."""
    pipeline = replace(SHAPE, shards=8, prompts=16).pipeline("prompts.parquet", 14)
    rollout = {"environment": "slow_parts:SlowGame", "max_turns": 1, "tool_concurrency": 96}
    pipeline["nodes"]["rollout"] |= rollout
    pipeline["nodes"]["reward"] = {"op": "reward", "fn": "environment"}
    return pipeline


CASES = {
    "reward": Case(
        DEMO | {"name": "reward", "nodes": {"reward": {"fn": "slow_parts:slow_reward"}}},
        {
            "run.host_workers": (),
            "schedule.max_staleness": (),
            "nodes.reward": ("nodes.reward.args={seconds: 0.4}",),
        },
    ),
    "straggler": Case(
        _straggling(),
        {"nodes.rollout.over_sampling_batch_size": ()},
        module=("timed_run",),
        timings=replace(SHAPE, shards=8, prompts=16),
        rollout_s=0.05,
    ),
    "engines": Case(
        _engines(),
        {"schedule.stream_update": (), "schedule.max_staleness": (), "groups.rollout.cpus_per_node": ()},
        module=("timed_run",),
        timings=SHAPE,
    ),
    "cores": Case(
        DEMO
        | {
            "name": "cores",
            "model": {"init": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}},
            "nodes": {"rollout": {"n": 16}},
        },
        {"schedule.max_staleness": (), "groups.rollout.cpus_per_node": ()},
        computes=True,
    ),
    "micro_batch": Case(
        DEMO | {"name": "micro-batch", "nodes": {"update": {"tokens_per_micro_batch": 64}}},
        {"nodes.update.tokens_per_micro_batch": ()},
        computes=True,
    ),
    "turns": Case(
        DEMO
        | {
            "name": "turns",
            "model": {"init": _LARGER},
            "groups": {"train": {"cpus_per_node": 0, "gpus_per_node": 1}, "rollout": None},
            "engines": {"generator": _SERVER},
            "nodes": {"update": {"tokens_per_micro_batch": 512}},
        },
        {"nodes.update.tokens_per_micro_batch": (), "engines.actor.sleep": ()},
        gpus=1,
    ),
}


def main() -> None:
    """Measure, and say whether what was said holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), required=True, help="folder for the runs")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--case", choices=CASES, action="append", help="only these (default: all on CPUs)")
    args = parser.parse_args()
    found, verdicts = [], []
    for name in args.case or (name for name, case in CASES.items() if not case.gpus):
        case = CASES[name]
        before = run(case, args.out / name / "before")
        for start in case.follow:
            each = followed(case, before, start, args.out / name)
            found.append({"case": name, "cores": os.cpu_count(), "load": os.getloadavg()[0], **each})
            print(found[-1], flush=True)
            if not case.computes and "saved_s" in each:
                off = abs(each["predicted_s"] - each["saved_s"]) / each["saved_s"] if each["saved_s"] > 0 else 1.0
                verdicts.append(
                    Verdict(f"{name}: {each['key']}, share of the gain that is off", off, "at most", MOST_OFF)
                )
    tell({"measured": found}, verdicts, args.json)


def followed(case: Case, before: Explanation, start: str, folder: Path) -> dict[str, Any]:
    """Follow an advice; seconds of a step that it was to save, and that it has saved."""
    advice = next((each for each in before.advice if each.key.startswith(start)), None)
    if advice is None:
        return {"key": start, "step_s": before.usual_step_s, "said": "no advice"}
    after = run(case, folder / start, *(case.follow[start] or advice.key.split(" ")))
    measured = before.usual_step_s
    return {
        "key": advice.key,
        "step_s": measured,
        "predicted_step_s": advice.step_s,
        "after_s": after.usual_step_s,
        "predicted_s": measured - advice.step_s,
        "surely_s": (advice.least * measured, advice.most * measured),
        "saved_s": measured - after.usual_step_s,
    }


def run(case: Case, folder: Path, *overrides: str) -> Explanation:
    """Run a case, and explain its steps."""
    folder.mkdir(parents=True, exist_ok=True)
    if case.timings is not None:
        shape = case.timings
        shape.timings(rollout_s=case.rollout_s, update_s=0.1, sync_s=0.02, portion=2).write(folder)
        rows = (PromptRow("benchmark", f"{index:06d}", "0", {"index": index}) for index in range(4 * shape.prompts))
        write_prompts(folder / "prompts.parquet", rows, {"index": pa.int64()})
    target = folder / f"run-{os.getpid()}"
    settings = (*_NO_EXTRAS, f"run.steps={case.steps}", *overrides)
    with DagrlRun(case.pipeline, target, *settings, module=case.module) as going:
        going.wait_for_step(case.steps, _LIMIT_S)
    return explain(target)


if __name__ == "__main__":
    main()
