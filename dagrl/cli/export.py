"""`dagrl export`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import OutputFolder, RunFolder


def export(
    run_dir: RunFolder,
    output: OutputFolder,
    step: Annotated[int | None, typer.Option(metavar="N", help="its checkpoint (default: the newest)")] = None,
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint, by the metric of run.keep_best")] = False,
    engine: Annotated[str | None, typer.Option(metavar="NAME", help="the engine, where the run trains several")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="the low-rank adapters alone, as a PEFT folder")] = False,
) -> int:
    """Write the policy of a run as a Hugging Face folder: exact weights, config, tokenizer. Adapters are merged.

    Needs neither the run's layout nor a GPU.
    """
    from dagrl.orchestrator.export import export_run

    if best and step is not None:
        raise typer.BadParameter("not allowed together with --step", param_hint="'--best'")
    return print_result(
        "export", lambda: export_run(run_dir, output, step=step, engine=engine, best=best, adapter=adapter)
    )


def print_result(command: str, write: Callable[[], str]) -> int:
    """Call `write`, which writes weights, and print its summary, or why it failed."""
    from dagrl.orchestrator.export import WrongCallError

    with exit_on(command, ValueError, OSError, code=1), exit_on(command, WrongCallError):
        print(write())
    return 0
