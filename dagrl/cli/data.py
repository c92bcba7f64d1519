"""`dagrl data`."""

from __future__ import annotations

import ast
import runpy
import sys
from typing import Annotated

import typer

from dagrl.cli import completion
from dagrl.cli.data_environment import data_environment
from dagrl.cli.data_stats import data_stats
from dagrl.cli.parameters import AsJson, print_json
from dagrl.config.errors import suggest
from dagrl.resources import DATA_SCRIPTS, data_script_names


def data(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="the data set", show_default=False, autocompletion=completion.data_sets),
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENT ...]", help="of its script; NAME --help lists them", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write the prompt files of a known data set or an environment, list the former, or show statistics of files.

    Examples:
        dagrl data
        dagrl data gsm8k --local_dir data/gsm8k
        dagrl data gsm8k --local_dir data/gsm8k --source originals
        dagrl data gsm8k --help
        dagrl data stats data/gsm8k/train.parquet --val data/gsm8k/test.parquet
        dagrl data stats --help
        dagrl data environment --help
    """
    names = data_script_names()
    if name is None:
        titles = {script_name: _title(script_name) for script_name in names}
        if as_json:
            print_json([{"name": script_name, "description": title} for script_name, title in titles.items()])
        else:
            print("\n".join(f"{script_name:<{max(map(len, names))}}  {title}" for script_name, title in titles.items()))
        return 0
    if name == "stats":
        # Options before the word belong to it, too.
        return data_stats([*(arguments or []), *(["--json"] if as_json else [])])
    if name == "environment":
        return data_environment(arguments or [])
    if name not in names:
        raise typer.BadParameter(f"there is no script for the data set `{name}`; {suggest(name, names)}")
    script = DATA_SCRIPTS / f"{name}.py"
    before = sys.argv
    sys.argv = [str(script), *(arguments or [])]
    # As `python data_preprocess/NAME.py` does: a script may import another.
    sys.path.insert(0, str(DATA_SCRIPTS))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
        sys.path.remove(str(DATA_SCRIPTS))
    return 0


def _title(name: str) -> str:
    """The first words of a script's docstring, before its call."""
    text = ast.get_docstring(ast.parse((DATA_SCRIPTS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.partition(": python ")[0]
