"""`dagrl import`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, parse_path, print_json
from dagrl.config.errors import PipelineError

_INVALID, _DOES_NOT_FIT = 2, 3


def import_(
    script: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="SCRIPT",
            help="a launch script of verl, siiRL or slime, or a YAML of verl, ROLL or Trinity-RFT",
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="arguments that the script is called with", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", parser=parse_path, metavar="FILE", help="the file (default: pipeline.yaml)"),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="the framework (default: by the content)")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="a variable of the environment that the script runs in"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Translate a script or configuration of another framework into a pipeline. None of its programs is executed.

    Prints what became of each setting, and what `dagrl validate` and `dagrl plan` say of the pipeline. Exits 2 if the
    pipeline is not valid, and 3 if its plan does not fit.

    Examples:
        dagrl import run_verl.sh -o pipeline.yaml
        dagrl import run_slime.sh --set MODEL_DIR=models --json
    """
    from dagrl.importing import report
    from dagrl.importing.importer import import_file
    from dagrl.importing.registry import FRAMEWORKS
    from dagrl.plugins.isolation import without_imports

    output = output or Path("pipeline.yaml")
    with exit_on("import", ValueError):
        if source is not None and source not in FRAMEWORKS:
            raise ValueError(f"--from takes {', '.join(FRAMEWORKS)}, got {source!r}")
        if os.path.lexists(output):
            raise ValueError(f"{output} exists; remove it, or name another file with -o")
        imported = import_file(script, arguments or (), _variables(variables or []), source)
        _write(imported.text, output)
    with without_imports():
        code, checks = _checked(output)
    if as_json:
        print_json({"pipeline": str(output), **report.as_object(imported.translation, imported.remarks), **checks})
    else:
        print(report.as_text(imported.translation, imported.remarks))
        print(f"Wrote {output}")
        # Both may name the same problems.
        further = [line for line in checks["plan"] if not code or line not in checks["validate"]]
        print("\n".join([*checks["validate"], *further]))
    return code


def _write(text: str, output: Path) -> None:
    try:
        # Never through a link.
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"{output} cannot be written ({error.strerror}); name another file with -o") from error


def _variables(texts: list[str]) -> dict[str, str]:
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--set takes NAME=VALUE, got {text!r}")
        variables[name] = value
    return variables


def _checked(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the texts of `dagrl validate` and `dagrl plan`."""
    from dagrl.planner.showing import report, show, show_steps
    from dagrl.validation import check_file
    from dagrl.validation.summary import summarize

    code, texts = 0, {}
    try:
        texts["validate"] = summarize(check_file(path)).splitlines()
    except PipelineError as error:
        code, texts["validate"] = _INVALID, str(error).splitlines()
    try:
        planned = report.report(path, [])
        texts["plan"] = show.as_text(planned, show_steps.plan_sections(planned)).splitlines()
        if not planned.fits:
            texts["plan"] += show.problems_in_words(planned)
            code = code or _DOES_NOT_FIT
    except PipelineError as error:
        code, texts["plan"] = _INVALID, [] if texts["validate"] == str(error).splitlines() else str(error).splitlines()
    except ValueError as error:
        texts["plan"] = [f"dagrl plan: {error}"]
    return code, texts
