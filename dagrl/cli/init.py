"""`dagrl init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli import completion
from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, parse_path, print_json


def init(
    folder: Annotated[
        Path | None,
        typer.Argument(parser=parse_path, metavar="[DIR]", help="the project's folder (default: this one)"),
    ] = None,
    template: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="the template that its pipeline extends; several are merged in this order",
            autocompletion=completion.templates,
        ),
    ] = ["grpo"],  # noqa: B006 (typer copies it)
    as_json: AsJson = False,
) -> int:
    """Begin a project: a pipeline that extends a template, a reward with a test, .gitignore and a README.

    Nothing is overwritten.

    Examples:
        dagrl init
        dagrl init sums --template tiny_grpo
        dagrl init sums --template gspo --template tiny
    """
    from dagrl.scaffold import scaffold

    folder = folder or Path()
    with exit_on("init", ValueError, OSError):
        made = scaffold(folder, template)
    if as_json:
        print_json({"written": [str(path) for path in made.written], "kept": [str(path) for path in made.kept]})
        return 0
    for path in made.written:
        print(path)
    for path in made.kept:
        print(f"{path} was there, and is unchanged")
    enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"next: {enter}dagrl validate pipeline.yaml")
    return 0
