"""Arguments and options that several commands take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def parse_path(text: str) -> Path:
    """Return the path with the home folder in place of ``~``. An empty text would be the working directory."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("expected a path, got an empty text or one with a NUL character")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user's `~name` stays as it is)


Pipeline = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="PIPELINE", help="the pipeline's YAML file", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="set a key for this call: engines.actor.optimizer.lr=3e-6 (YAML value; null removes the key)",
        show_default=False,
    ),
]
NewRunFolder = Annotated[
    Path | None, typer.Option("--run-dir", parser=parse_path, metavar="DIR", help="the run folder (default: runs/NAME)")
]
RunFolder = Annotated[Path, typer.Argument(parser=parse_path, metavar="RUN", help="the run folder")]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", parser=parse_path, metavar="DIR", help="the folder to write")
]
