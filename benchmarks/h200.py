"""Everything that is proven on GPUs, for the number of GPUs that a host has: layouts, memory, speed, the pipeline.

    python benchmarks/h200.py --out FOLDER [--gpus N] [--only PART ...] [--list]

Each part has a time limit of its own and writes to ``FOLDER/NAME.log``; none stops the others. Parts run from the most
to the least important. ``summary.txt`` and the end of the output say how each one ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/engines/megatron"
NOISE = ("warn", "it/s]", "__array")


@dataclass(frozen=True, slots=True)
class Part:
    """One command."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    tail: int = 12
    """Lines at the end of its output that are shown."""


def parts(gpus: int, out: Path, weights: Path) -> list[Part]:
    """What is run on a host with that many GPUs."""

    def speed(name: str, limit_s: int, *arguments: str) -> Part:
        command = ("benchmarks/train_step.py", *arguments, "--weights", str(weights))
        return Part(name, (*command, "--json", str(out / f"{name}.json")), limit_s)

    def layouts(limit_s: int) -> Part:
        command = (f"{TESTS}/gpu_layouts.py", "--ranks", str(gpus), "--out", str(out))
        return Part(f"layouts_{gpus}", command, limit_s, tail=80)

    def tests(name: str, limit_s: int, *arguments: str) -> Part:
        command = ("-m", "pytest", "-m", "gpu", "-rA", "-q", "-p", "no:cacheprovider", *arguments)
        return Part(name, command, limit_s, tail=30)

    memory = Part("memory", (f"{TESTS}/gpu_memory.py", "--ranks", str(gpus), "--out", str(out)), 300, tail=30)
    profile = ("--profile", str(out / "kernels"))
    eight_billion = ("--model", "8b", "--rounds", "8", "--warmup", "2")
    by_gpus: dict[int, list[Part]] = {
        1: [
            speed("train_1.7b", 240, "--model", "1.7b", *profile),
            layouts(300),
            memory,
            speed("train_1.7b_fused", 150, "--model", "1.7b", "--fused-linear-cross-entropy", "--rounds", "5"),
        ],
        2: [
            layouts(420),
            speed("train_8b_tp2", 360, *eight_billion, "--ranks", "2", "--tensor-parallel", "2"),
            memory,
            tests("pipeline", 300, "tests/runtime/test_gpu.py"),
        ],
        4: [layouts(420), speed("train_1.7b_dp4", 200, "--model", "1.7b", "--ranks", "4", "--rounds", "6")],
        8: [layouts(420)],
    }
    if gpus not in by_gpus:
        raise SystemExit(f"nothing is planned for {gpus} GPUs; give --gpus as one of {sorted(by_gpus)}")
    return by_gpus[gpus]


def main() -> None:
    """Run the parts; exits with the number of those that did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, help="default: all of the host")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--weights", type=Path, default=Path("/tmp/dagrl-weights"), help="where start weights are kept")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    args = parser.parse_args()
    gpus = args.gpus or _gpus()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve()
    chosen = [part for part in parts(gpus, out, args.weights) if not args.only or part.name in args.only]
    if args.list:
        for part in chosen:
            print(f"{part.name:20} {part.limit_s:4} s  {' '.join(part.command)}")
        return
    verdicts = []
    for part in chosen:
        begun = time.monotonic()
        code, log = _run(part, out)
        verdict = "ok" if code == 0 else f"over its {part.limit_s} s" if code is None else f"exit code {code}"
        verdicts.append((part.name, verdict, time.monotonic() - begun))
        print(f"== {part.name}: {verdict}, {verdicts[-1][2]:.0f} s", flush=True)
        lines = [line for line in log.read_text(errors="replace").splitlines() if not _is_noise(line)]
        print("\n".join(line[:220] for line in lines[-part.tail :]), flush=True)
    summary = "\n".join(f"{name:20} {seconds:6.0f} s  {verdict}" for name, verdict, seconds in verdicts)
    (out / "summary.txt").write_text(summary + "\n")
    print(f"== summary\n{summary}", flush=True)
    sys.exit(sum(verdict != "ok" for _, verdict, _ in verdicts))


def _run(part: Part, out: Path) -> tuple[int | None, Path]:
    """Its exit code, None where it ran out of time, and its log. All of its processes are ended with it."""
    log = out / f"{part.name}.log"
    path = os.pathsep.join(entry for entry in (os.environ.get("PYTHONPATH"), str(ROOT)) if entry)
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_session(process.pid)
            process.wait()
    return code, log


def _end_session(leader: int) -> None:
    """End what the command left behind, and the command itself if it still runs."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_noise(line: str) -> bool:
    return not line.strip() or any(word in line.lower() for word in NOISE)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
