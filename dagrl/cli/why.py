"""`dagrl why`."""

from __future__ import annotations

from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, RunFolder, print_json


def why(
    run_dir: RunFolder,
    step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="explain this step (default: the newest)")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Explain where the time of a step went, and which keys of the pipeline would make steps shorter.

    Examples:
        dagrl why runs/first
        dagrl why runs/first --step 20
        dagrl why runs/first --json
    """
    from dagrl.reporting.why import explain

    with exit_on("why", ValueError):
        explanation = explain.explain(run_dir, step)
    if as_json:
        print_json(explain.as_values(explanation))
    else:
        print(explain.as_text(run_dir, explanation), end="")
    return 0
