"""`dagrl templates`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Annotated

import typer

from dagrl.cli import completion
from dagrl.cli.parameters import AsJson, print_json
from dagrl.config.errors import suggest
from dagrl.resources import OWN_TEMPLATES, template_description, template_names, template_parents, template_text


def templates(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="the template to print", show_default=False, autocompletion=completion.templates
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List dagrl's templates, or print one. `extends: NAME` in a pipeline builds on it.

    Examples:
        dagrl templates
        dagrl templates grpo
        dagrl templates --json
    """
    names = template_names()
    if name is None:
        if as_json:
            print_json([_values(template) for template in names])
        else:
            _print_list(names)
        return 0
    if name not in names:
        raise typer.BadParameter(f"there is no template `{name}`; {suggest(name, names)}")
    if as_json:
        print_json(_values(name) | {"text": template_text(name)})
    else:
        print(template_text(name), end="")
    return 0


def _values(name: str) -> dict[str, object]:
    return {
        "name": name,
        "description": template_description(name),
        "extends": template_parents(name),
        "path": str(OWN_TEMPLATES / f"{name}.yaml"),
    }


def _print_list(names: list[str]) -> None:
    wide = max(map(len, names))
    # A file has no width.
    width = shutil.get_terminal_size().columns - wide - 2 if sys.stdout.isatty() else 10_000
    for name in names:
        print(f"{name:<{wide}}  {textwrap.shorten(template_description(name), max(width, 40), placeholder=' ...')}")
