"""Arguments and options that several commands take."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dagrl.cli import completion
from dagrl.resources import pipeline_file, why_no_path

if TYPE_CHECKING:
    from dagrl.validation.part import PartOptions


def parse_path(text: str) -> Path:
    """Return the path with the home folder in place of ``~``. An empty text would be the working directory."""
    if not text.strip():
        raise typer.BadParameter("expected a path, got an empty text")
    if why := why_no_path(text):
        raise typer.BadParameter(f"expected a path, got one that {why}")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user's `~name` stays as it is)


def parse_pipeline(text: str) -> Path:
    """Return the path of a pipeline file; a name without such a file is that of one of dagrl's templates."""
    path = parse_path(text)
    # `./grpo` is a file, whether it exists or not.
    return pipeline_file(path) if str(path) == text else path


def print_json(value: object) -> None:
    """Print one JSON value, as every `--json` does. NaN and infinity are null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False), flush=True)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not -float("inf") < value < float("inf") else value


Pipeline = Annotated[
    Path,
    typer.Argument(
        parser=parse_pipeline,
        metavar="PIPELINE",
        help="the pipeline's YAML file, or the name of a template",
        show_default=False,
        autocompletion=completion.pipelines,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="set a key for this call: engines.actor.optimizer.lr=3e-6 (YAML value; null removes the key)",
        show_default=False,
        autocompletion=completion.overrides,
    ),
]
NewRunFolder = Annotated[
    Path | None, typer.Option("--run-dir", parser=parse_path, metavar="DIR", help="the run folder (default: runs/NAME)")
]
RunFolder = Annotated[
    Path, typer.Argument(parser=parse_path, metavar="RUN", help="the run folder", autocompletion=completion.runs)
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(
        parser=parse_path, metavar="RUN", help="the run folder", show_default=False, autocompletion=completion.runs
    ),
]
OutputFolder = Annotated[
    Path, typer.Option("--output", "-o", parser=parse_path, metavar="DIR", help="the folder to write")
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="NODES",
        help="run one part of the pipeline: these nodes, such as rollout,reward, and those between them",
    ),
]
Explorer = Annotated[
    str | None,
    typer.Option(
        "--explorer", metavar="I/N", help="with --only: the I-th of N explorers, each of which takes other prompts"
    ),
]
Experience = Annotated[
    Path | None,
    typer.Option(
        parser=parse_path,
        metavar="DIR",
        help="with --only: the folder where the parts exchange experience and weights (default: RUN/experience)",
    ),
]


def parse_part(only: str | None, explorer: str | None = None, experience: Path | None = None) -> PartOptions | None:
    """The part of a pipeline that ``--only`` and ``--explorer`` name. `experience` is allowed only with a part."""
    from dagrl.config.share import Share
    from dagrl.validation.part import PartOptions

    if only is None:
        if explorer is not None:
            raise typer.BadParameter("needs --only", param_hint="'--explorer'")
        if experience is not None:
            raise typer.BadParameter("needs --only", param_hint="'--experience'")
        return None
    names = tuple(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter("expected names of nodes, such as rollout,reward", param_hint="'--only'")
    try:
        return PartOptions(names, Share() if explorer is None else Share.parse(explorer))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--explorer'") from None


AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="print every metric of each step")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print warnings and failures only")]
