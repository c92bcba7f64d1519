"""Everything that is proven on GPUs, for the number of GPUs that a host has.

    python benchmarks/h200.py --out FOLDER [--suite rollout trainer ...] [--gpus N] [--only PART ...] [--list]

Each part has a time limit of its own and writes to ``FOLDER/NAME.log`` and, where it measures something, to
``FOLDER/NAME.json``; none stops the others. Parts that need few of the GPUs run beside each other, each on its own; the
more important ones begin first. ``summary.txt`` and the end of the output say how each one ended and what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from suites import SUITES, Part, parts

ROOT = Path(__file__).parents[1]
NOISE = ("warn", "it/s]", "__array")
VERDICTS = ("ok  ", "NOT ")


class Desk:
    """Who has which GPUs. A part holds an equal share of each of its GPUs, the whole of it unless it can be shared."""

    def __init__(self, gpus: int) -> None:
        self._taken = [0.0] * gpus
        self._shared = [0] * gpus
        """Parts that a GPU can hold at once, by the part that is on it."""

    def take(self, part: Part) -> tuple[int, ...] | None:
        """GPUs for a part, those that are shared already first; None where there are too few."""
        share = 1 / part.at_once
        fitting = [
            gpu
            for gpu, taken in enumerate(self._taken)
            if taken + share < 1 + 1e-6 and (taken == 0 or self._shared[gpu] == part.at_once)
        ]
        chosen = sorted(fitting, key=lambda gpu: (-self._taken[gpu], gpu))[: part.gpus]
        if len(chosen) < part.gpus:
            return None
        for gpu in chosen:
            self._taken[gpu] += share
            self._shared[gpu] = part.at_once
        return tuple(sorted(chosen))

    def give_back(self, part: Part, gpus: tuple[int, ...]) -> None:
        """A part is over."""
        for gpu in gpus:
            left = self._taken[gpu] - 1 / part.at_once
            self._taken[gpu] = left if left > 1e-6 else 0.0


class Running:
    """A part under way. All of its processes are ended with it."""

    def __init__(self, part: Part, gpus: tuple[int, ...], out: Path, deadline: float) -> None:
        self.part = part
        self.gpus = gpus
        self.log = out / f"{part.name}.log"
        self.begun = time.monotonic()
        self._deadline = min(deadline, self.begun + part.limit_s)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(max(gpus, default=0) + 1)]
        path = os.pathsep.join(entry for entry in (os.environ.get("PYTHONPATH"), str(ROOT)) if entry)
        environment = os.environ | {
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in gpus),
        }
        with self.log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *part.command],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def verdict(self) -> str | None:
        """How it ended; None while it runs and has time left."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline:
            return None
        self.end()
        if code is None:
            return f"over its {self._deadline - self.begun:.0f} s"
        return "ok" if code == 0 else f"exit code {code}"

    def end(self) -> None:
        """End what it left behind, and the command itself if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def main() -> None:
    """Run the parts; exits with the number of those that did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=["rollout"])
    parser.add_argument("--gpus", type=int, help="default: all of the host")
    parser.add_argument("--only", nargs="*", help="names of parts, or how they begin")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which everything is ended")
    parser.add_argument("--weights", type=Path, default=Path("/tmp/dagrl-weights"), help="where start weights are kept")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    args = parser.parse_args()
    gpus = args.gpus or _gpus()
    args.out.mkdir(parents=True, exist_ok=True)
    found = [part for suite in args.suite for part in parts(suite, gpus, args.out.resolve(), args.weights)]
    found = list({part.name: part for part in found}.values())
    chosen = [part for part in found if not args.only or part.name.startswith(tuple(args.only))]
    if args.list:
        for part in chosen:
            print(f"{part.name:46} {part.gpus} GPUs {part.limit_s:4} s  {' '.join(part.command)}")
        return
    outcomes = run_all(chosen, gpus, args.out.resolve(), args.limit)
    for name in ("learning", "plan_accuracy"):
        if any(name in " ".join(part.command) for part in chosen):
            outcomes |= run_all([_summary(name, args.out.resolve())], gpus, args.out.resolve(), 60)
    sys.exit(sum(outcome != "ok" for outcome in outcomes.values()))


def _summary(script: str, out: Path) -> Part:
    """What a script makes of all of its parts together."""
    return Part(script, (f"benchmarks/{script}.py", "--summarize", str(out)), 60, tail=40, gpus=0)


def run_all(waiting: list[Part], gpus: int, out: Path, limit_s: float) -> dict[str, str]:
    """Run the parts, as many at once as the GPUs allow; how each ended, by name. Tells of each when it is over."""
    waiting, desk, deadline = list(waiting), Desk(gpus), time.monotonic() + limit_s
    running: list[Running] = []
    outcomes: dict[str, str] = {}
    try:
        while waiting or running:
            for part in list(waiting):
                if time.monotonic() > deadline:
                    outcomes[part.name] = "not begun in time"
                    waiting.remove(part)
                elif (taken := desk.take(part)) is not None:
                    running.append(Running(part, taken, out, deadline))
                    waiting.remove(part)
            for each in list(running):
                if (verdict := each.verdict()) is not None:
                    running.remove(each)
                    desk.give_back(each.part, each.gpus)
                    outcomes[each.part.name] = verdict
                    _tell(each, verdict, out)
            time.sleep(0.1)
    finally:
        for each in running:
            each.end()
    return outcomes


def _tell(ended: Running, verdict: str, out: Path) -> None:
    """The end of a part's output, and a line of the summary for itself and for each thing that it found."""
    lines = [line[:220] for line in ended.log.read_text(errors="replace").splitlines() if not _is_noise(line)]
    seconds = time.monotonic() - ended.begun
    print(f"== {ended.part.name}: {verdict}, {seconds:.0f} s", flush=True)
    print("\n".join(lines[-ended.part.tail :]), flush=True)
    with (out / "summary.txt").open("a") as summary:
        summary.write(f"{ended.part.name:46} {seconds:6.0f} s  {verdict}\n")
        summary.writelines(f"    {line}\n" for line in lines if line.startswith(VERDICTS))


def _is_noise(line: str) -> bool:
    return not line.strip() or any(word in line.lower() for word in NOISE)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
