"""`dagrl diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, parse_path, print_json

_EQUAL, _PARTED = 0, 1


def diff(
    left: Annotated[Path, typer.Argument(parser=parse_path, metavar="RUN1", help="a run folder", show_default=False)],
    right: Annotated[Path, typer.Argument(parser=parse_path, metavar="RUN2", help="another", show_default=False)],
    as_json: AsJson = False,
) -> int:
    """Name the first step, node, column and row in which two runs part.

    Compares records where both runs have them (run.record), and metrics and samples of all steps. Exits 0 if the runs
    are equal, 1 if they part, 2 if they cannot be compared.

    Examples:
        dagrl diff runs/one runs/other
    """
    from dagrl.reporting.diff import as_dict, diff_runs, lines_of

    with exit_on("diff", ValueError, OSError):
        result = diff_runs(left, right)
    if as_json:
        print_json(as_dict(result))
    else:
        print(*lines_of(left, right, result), sep="\n")
    return _EQUAL if result.parting is None else _PARTED
