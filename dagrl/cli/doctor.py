"""`dagrl doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.help import help_of
from dagrl.cli.parameters import AsJson, parse_path, print_json
from dagrl.config.errors import counted

if TYPE_CHECKING:
    from dagrl.doctor.findings import Finding, Verdict

doctor = typer.Typer(rich_markup_mode=None, subcommand_metavar="[COMMAND ...]")


def examine_machine(context: typer.Context, as_json: AsJson = False) -> int:
    """Report what this machine can run, and what is missing.

    Prints a line for each check: `ok`, `hint` or `missing`. Exits 1 where something is missing that runs need.

    Examples:
        dagrl doctor
        dagrl doctor --json
        dagrl doctor model ~/models/Qwen3-8B
    """
    if context.invoked_subcommand is not None:
        return 0
    from dagrl.doctor.examination import examine
    from dagrl.doctor.findings import Verdict

    counts, values = _show(examine(), silent=as_json)
    missing, hints = counts[Verdict.MISSING], counts[Verdict.HINT]
    if as_json:
        print_json({"missing": missing, "hints": hints, "findings": values})
    else:
        print(f"{missing} missing, {counted(hints, 'hint')}")
    return 1 if missing else 0


def model(
    path: Annotated[
        Path,
        typer.Argument(
            parser=parse_path,
            metavar="PATH",
            help="a Hugging Face folder, or a name as in model.path",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> int:
    """Report what dagrl and the installed libraries know of a model: its config, its training and its servers.

    Reads config.json only. Exits 1 where the Megatron engine does not train the model.

    Examples:
        dagrl doctor model ~/models/Qwen3-8B
        dagrl doctor model Qwen/Qwen3-8B --json
    """
    from dagrl.doctor.findings import Verdict
    from dagrl.doctor.model import examine_model

    with exit_on("doctor model", ValueError, OSError):
        sections, step = examine_model(path)
    counts, values = _show(sections, silent=as_json)
    trains = not counts[Verdict.REFUSED]
    if as_json:
        print_json({"trains": trains, "next": step, "findings": values})
    else:
        print(f"next: {step}")
    return 0 if trains else 1


def _show(
    sections: Iterable[tuple[str, Iterable[Finding]]], *, silent: bool
) -> tuple[Counter[Verdict], list[dict[str, Any]]]:
    """Print findings by section, each as soon as it is known; returns their counts, and their values for JSON."""
    from rich.text import Text

    from dagrl.doctor.findings import Verdict
    from dagrl.tables import HEADING, render

    styles = {Verdict.OK: "green", Verdict.HINT: "yellow"}
    counts: Counter[Verdict] = Counter()
    values = []

    def show(line: Text) -> None:
        if not silent:
            print(render([line]), end="", flush=True)

    for title, findings in sections:
        show(Text(title, HEADING))
        for finding in findings:
            verdict = (f"{finding.verdict.value:<8}", styles.get(finding.verdict, "bold red"))
            show(Text.assemble("  ", verdict, f" {finding.name:<22} {finding.text}"))
            counts[finding.verdict] += 1
            about = {"section": title, "name": finding.name, "text": finding.text}
            values.append({"verdict": finding.verdict.value, **about})
    return counts, values


doctor.callback(invoke_without_command=True, **help_of(examine_machine))(examine_machine)
doctor.command("model", short_help="Report what is known of a model.", **help_of(model))(model)
