"""`dagrl replay`."""

from __future__ import annotations

import pdb
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, RunFolder, print_json

if TYPE_CHECKING:
    from dagrl.orchestrator.replay.replay import ReplayOutcome

_EQUAL, _DIFFERS, _NOTHING_TO_COMPARE = 0, 1, 4


@contextmanager
def _post_mortem() -> Iterator[None]:
    """Open pdb where an exception was raised, if there is a terminal."""
    from dagrl.orchestrator.records.files import RecordError

    try:
        yield
    except RecordError:
        raise
    except Exception:
        # The node may run the user's code, which may raise anything. It is raised again in any case.
        if sys.stdin.isatty():
            traceback.print_exc()
            pdb.post_mortem()
        raise


def replay(
    run_dir: RunFolder,
    step: Annotated[int, typer.Option(min=1, metavar="N", help="the step")],
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="the node (default: all recorded nodes)", show_default=False)
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="another layout of the node's engine: tensor_model_parallel_size=2, or cpus_per_node=2; repeatable",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Literal["cpu"] | None, typer.Option(help="move the engine from GPUs to the CPU", show_default=False)
    ] = None,
    within: Annotated[
        float, typer.Option(min=0.0, metavar="R", help="accept differences up to this part of the largest value")
    ] = 0.0,
    debug: Annotated[bool, typer.Option("--debug", help="run in this process, where pdb works")] = False,
    as_json: AsJson = False,
) -> int:
    """Run a recorded node again, alone, and compare what it gives with the record, bit by bit.

    Exits 0 if all is equal to the bit (or differs by no more than --within), 1 if something differs or the node fails,
    2 if the call is wrong or nothing usable was recorded, 4 if the run ended before the node did.

    Examples:
        dagrl replay runs/tiny_grpo --step 3 --node update
        dagrl replay runs/tiny_grpo --step 3 --node update --json
        dagrl replay runs/tiny_grpo --step 3 --node update --layout tensor_model_parallel_size=2 --within 1e-5
    """
    from dagrl.orchestrator.records.files import RecordError
    from dagrl.orchestrator.replay.target import find_target

    with exit_on("replay", RecordError):
        target = find_target(run_dir, step, node, layout=layout or (), to_cpu=to == "cpu", debug=debug)
    out = sys.stderr if as_json else sys.stdout
    for note in target.notes:
        print(f"dagrl replay: warning: {note}", file=sys.stderr)
    nodes = ", ".join(dict.fromkeys(run.record.node for run in target.runs))
    print(f"replaying {nodes} of step {step}", file=out, flush=True)
    from dagrl.orchestrator.replay.replay import replay as replay_node
    from dagrl.workers.errors import RunError

    try:
        with exit_on("replay", RecordError), _post_mortem() if debug else nullcontext():
            outcome = replay_node(target, run_dir, lambda text: print(f"  {text}", file=out, flush=True), debug=debug)
    except RunError as error:
        print("dagrl replay: failed", *error.lines(), sep="\n", file=sys.stderr)
        return _DIFFERS
    result, status = _result(outcome, within)
    if as_json:
        print_json(_as_json(step, result, outcome, target.notes))
    else:
        print(*_lines(result, outcome, within), sep="\n")
    return status


def _result(outcome: ReplayOutcome, within: float) -> tuple[str, int]:
    if outcome.failure is not None:
        return "fails", _DIFFERS
    if outcome.differences and outcome.largest > within:
        return "differs", _DIFFERS
    if outcome.not_recorded:
        return "nothing to compare", _NOTHING_TO_COMPARE
    return ("agrees" if outcome.differences else "equal"), _EQUAL


def _lines(result: str, outcome: ReplayOutcome, within: float) -> Iterator[str]:
    if outcome.failure is not None:
        yield f"{outcome.failed} fails" + (", as it did in the run" if outcome.not_recorded else "")
        yield from outcome.failure.lines()
        return
    for name, compared in outcome.compared.items():
        yield f"  compared of {name}: {', '.join(compared)}"
    for difference in outcome.differences:
        yield f"  {difference.what}: {difference.text}"
    endings = {
        "nothing to compare": "nothing to compare: the run ended before the node did, and now it has ended",
        "agrees": f"agrees within {within:g}",
        "equal": "equal to the bit",
    }
    yield endings.get(result, result)


def _as_json(step: int, result: str, outcome: ReplayOutcome, warnings: Sequence[str]) -> dict[str, object]:
    failure = outcome.failure
    return {
        "step": step,
        "result": result,
        "largest": outcome.largest,
        "compared": outcome.compared,
        "differences": [asdict(difference) for difference in outcome.differences],
        "failure": failure
        and {
            "node": outcome.failed,
            "worker": failure.worker,
            "cause": failure.cause,
            "as_in_the_run": outcome.not_recorded,
        },
        "warnings": warnings,
    }
