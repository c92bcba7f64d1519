"""Time the same GRPO steps in verl and in dagrl, one after the other on the same GPUs, and print seconds by phase.

    PYTHONPATH=.:benchmarks python benchmarks/peers/verl/compare.py --case on_policy --out FOLDER

Weights and prompts are written first; both read the same. Settings are one table, `cases.SETTINGS`. README.md beside
this file says what has to be installed and what the comparison is worth. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import CASES, Case, dagrl_pipeline, settings_of, verl_arguments, verl_module
from dagrl_run import DagrlRun
from inputs import write_inputs
from options import add_settings
from phases import medians, ratios, table, verl_steps
from reports import tell

_HERE = Path(__file__).parent
_START_S = 600.0
_STEP_S = 180.0
_SHOWN_CHARACTERS = 6000
_SMOKE: dict[str, Any] = {"model": "tiny", "prompts": 8, "n": 2, "prompt_tokens": 16, "response_tokens": 16}


def main() -> None:
    """Prepare, run both, compare."""
    args = _arguments()
    case = _case(args)
    folder = (args.out / case.name).resolve()
    model, prompts = write_inputs(case, folder, (args.weights or args.out / "weights").resolve())
    seconds: dict[str, dict[str, float]] = {}
    checks: dict[str, float] = {}
    for name in args.only or ("verl", "dagrl"):
        if name == "verl":
            seconds[name], checks = run_verl(case, model, folder, args.verl_python, args.warmup)
        else:
            seconds[name] = run_dagrl(case, model, prompts, folder, args.warmup, args.set)
    print(f"\n{case.name}: {case.model}, {case.load.samples} samples of {case.prompt_tokens}/{case.response_tokens}")
    print(table(seconds))
    result = {
        "case": case.name,
        "settings": {setting.dagrl: setting.value(case) for setting in settings_of(case)},
        "set": args.set,
        "median_s": seconds,
        "verl_over_dagrl": ratios(seconds),
        "verl": checks,
    }
    tell(result, [], args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for data, runs and logs")
    parser.add_argument("--weights", type=Path, help="keep start weights here for later runs")
    parser.add_argument("--only", action="append", choices=("verl", "dagrl"), help="run one of the two; repeatable")
    parser.add_argument("--verl-python", default=sys.executable, help="Python of the environment that has verl")
    parser.add_argument("--mode", choices=("together", "turns"), help="of a case on shared GPUs")
    parser.add_argument("--gpus", type=int, help="of trainer and servers, or of either where they are apart")
    parser.add_argument("--rows-per-micro-batch", type=int, help="fewer where GPUs have less memory")
    parser.add_argument("--steps", type=int, help="GRPO steps of each")
    parser.add_argument("--warmup", type=int, default=1, help="steps before the measured ones")
    add_settings(parser)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and little to do: to try the script out")
    return parser.parse_args()


def _case(args: argparse.Namespace) -> Case:
    case = CASES[args.case]
    if args.smoke:
        case = replace(case, **_SMOKE, rows_per_micro_batch=4, steps=3)
    given = {name: getattr(args, name) for name in ("gpus", "rows_per_micro_batch", "steps")}
    case = replace(case, **{name: value for name, value in given.items() if value})
    if args.mode and case.mode != "apart":
        case = replace(case, mode=args.mode)
    return case


def run_dagrl(
    case: Case, model: Path, prompts: Path, folder: Path, warmup: int, settings: Sequence[str] = ()
) -> dict[str, float]:
    """Median seconds by phase of a `dagrl run`, with further `settings`."""
    with DagrlRun(dagrl_pipeline(case, model, prompts), folder / "dagrl", *settings) as run:
        run.wait_for_step(case.steps, _START_S + case.steps * _STEP_S)
        steps = [line for line in run.metrics() if 1 <= line["step"] <= case.steps]
    return medians(steps, 1, warmup)


def run_verl(
    case: Case, model: Path, folder: Path, python: str, warmup: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds by phase of verl, and figures that tell whether it did the same work.

    RuntimeError with the end of verl's log if it fails, or if its responses are shorter than dagrl's.
    """
    metrics, log = folder / "verl.jsonl", folder / "verl.log"
    metrics.unlink(missing_ok=True)
    command = [python, "-m", *verl_module(case), *verl_arguments(case, model, folder)]
    (folder / "verl.args").write_text("\n".join(command) + "\n")
    environment = verl_environment(folder, metrics)
    with log.open("w") as output:
        limit = _START_S + case.steps * _STEP_S
        ended = subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False
        )
    if ended.returncode != 0:
        raise RuntimeError(f"verl ended with exit code {ended.returncode}:\n{_end_of(log)}")
    steps = verl_steps(metrics)
    checks: dict[str, float] = {
        name: steps[-1][name] for name in ("response_length/mean", "prompt_length/mean") if name in steps[-1]
    }
    if checks.get("response_length/mean", case.response_tokens) != case.response_tokens:
        raise RuntimeError(f"verl's responses have {checks['response_length/mean']} tokens, not {case.response_tokens}")
    return medians(steps[: case.steps], 0, warmup), checks


def verl_environment(folder: Path, metrics: Path) -> dict[str, str]:
    """The environment of verl's process, which writes its metrics to the file `metrics`."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(stubs(folder))])),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }


def stubs(folder: Path) -> Path:
    """A folder for verl's PYTHONPATH with a stand-in for megatron-energon, which megatron-bridge's config imports."""
    package = folder / "stubs" / "megatron" / "energon"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text((_HERE / "energon_stub.py").read_text())
    return folder / "stubs"


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-_SHOWN_CHARACTERS:]


if __name__ == "__main__":
    main()
