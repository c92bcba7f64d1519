"""`dagrl why`."""

from __future__ import annotations

from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, RunFolder


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
        found = explain.explain(run_dir, step)
        print(explain.as_json(found) if as_json else explain.as_text(run_dir, found), end="\n" if as_json else "")
    return 0
