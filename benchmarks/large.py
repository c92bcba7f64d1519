"""Run a few steps of a pipeline file as it is, and tell what they take: tokens/s/GPU, memory, time of each node.

    python benchmarks/large.py dag_templates/qwen3_8b_megatron.yaml --out FOLDER [--steps 3] [KEY=VALUE ...]

Nothing is saved: the run is ended when its steps are over. Prompts are made in place, of as many tokens as the file
allows. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from dagrl_run import DagrlRun, of_step
from pipelines import Load, write_prompt_file
from reports import tell

from dagrl.config.loading.loader import load_pipeline

_STEP_S = 300.0
_FIGURES = ("time/", "throughput/", "memory/", "mfu/", "response_tokens/", "mismatch/")


def main() -> None:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--start-limit", type=float, default=420.0, help="longest wait for the first step, seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder for the run and its files")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_intermixed_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.pipeline.stem
    pipeline = load_pipeline(args.pipeline, args.overrides).pipeline
    load = Load(pipeline.data.prompts_per_step, 1, pipeline.data.max_prompt_tokens, 0)
    prompts = write_prompt_file(args.out.resolve() / f"{name}_prompts.parquet", load, args.steps)
    changes: dict[str, Any] = {
        "extends": str(args.pipeline.resolve()),
        "name": f"{name}-measured",
        "data": {"train": str(prompts), "val": None},
        "run": {"steps": args.steps + 1, "save_every": None, "validate_every": None, "validate_first": False},
        "track": ["console"],
    }
    begun = time.monotonic()
    with DagrlRun(changes, args.out / f"{name}_run", *args.overrides) as run:
        run.wait_for_step(1, args.start_limit)
        started = time.monotonic() - begun
        run.wait_for_step(args.steps, args.steps * _STEP_S)
        metrics = run.metrics()[: args.steps]
        events = run.events()
    print(f"\n{name}: first step after {started:.0f} s")
    names = sorted({each for line in metrics for each in line if each.startswith(_FIGURES)})
    for each in names:
        print(f"{each:48}" + "".join(f"{line.get(each, float('nan')):14.3f}" for line in metrics))
    spans = {line["step"]: {event.label: event.seconds for event in of_step(events, line["step"])} for line in metrics}
    tell({"pipeline": name, "first_step_after_s": started, "metrics": metrics, "spans_s": spans}, [], args.json)


if __name__ == "__main__":
    main()
