"""`dagrl export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli import completion
from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, OutputFolder, RunFolder, print_json


def export(
    run_dir: RunFolder,
    output: OutputFolder,
    step: Annotated[int | None, typer.Option(metavar="N", help="its checkpoint (default: the newest)")] = None,
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint, by the metric of run.keep_best")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="the engine, where the run trains several", autocompletion=completion.engines
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="the low-rank adapters alone, as a PEFT folder")] = False,
    as_json: AsJson = False,
) -> int:
    """Write the policy of a run as a Hugging Face folder: exact weights, config, tokenizer. Adapters are merged.

    Needs neither the run's layout nor a GPU.

    Examples:
        dagrl export runs/first -o first-hf
        dagrl export runs/first -o first-20-hf --step 20 --engine actor
        dagrl export runs/first -o first-best-hf --best
    """
    from dagrl.orchestrator.export import export_run

    if best and step is not None:
        raise typer.BadParameter("not allowed together with --step", param_hint="'--best'")
    return print_result(
        "export",
        output,
        lambda: export_run(run_dir, output, step=step, engine=engine, best=best, adapter=adapter),
        as_json=as_json,
    )


def print_result(command: str, output: Path, write: Callable[[], str], *, as_json: bool) -> int:
    """Call `write`, which writes weights to `output`, and print its summary, or why it failed."""
    with exit_on(command, OSError, code=1), exit_on(command, ValueError):
        summary = write()
        if as_json:
            print_json({"output": str(output.absolute()), "summary": summary})
        else:
            print(summary)
    return 0
