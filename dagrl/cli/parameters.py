"""Arguments and options that several commands take."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer


def parse_path(text: str) -> Path:
    """Return the path with the home folder in place of ``~``. An empty text would be the working directory."""
    if not text.strip() or "\0" in text:
        raise typer.BadParameter("expected a path, got an empty text or one with a NUL character")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user's `~name` stays as it is)


def parse_pipeline(text: str) -> Path:
    """Return the path of a pipeline file; a name without such a file is that of one of dagrl's templates."""
    path = parse_path(text)
    if path.name == text and re.fullmatch(r"\w{1,100}", text) and not path.exists():
        from dagrl.config.loading.extends import OWN_TEMPLATES

        template = OWN_TEMPLATES / f"{text}.yaml"
        return template if template.is_file() else path
    return path


Pipeline = Annotated[
    Path,
    typer.Argument(
        parser=parse_pipeline,
        metavar="PIPELINE",
        help="the pipeline's YAML file, or the name of a template",
        show_default=False,
    ),
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
RunFolders = Annotated[
    list[Path], typer.Argument(parser=parse_path, metavar="RUN", help="the run folder", show_default=False)
]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", parser=parse_path, metavar="DIR", help="the folder to write")
]
