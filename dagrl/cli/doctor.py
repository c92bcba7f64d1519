"""`dagrl doctor`."""

from __future__ import annotations

from collections import Counter

from dagrl.cli.parameters import AsJson, print_json
from dagrl.config.errors import counted


def doctor(as_json: AsJson = False) -> int:
    """Report what this machine can run, and what is missing.

    Prints a line for each check: `ok`, `hint` or `missing`. Exits 1 where something is missing that runs need.

    Examples:
        dagrl doctor
        dagrl doctor --json
    """
    from rich.text import Text

    from dagrl.doctor.examination import examine
    from dagrl.doctor.findings import Verdict
    from dagrl.tables import HEADING, render

    styles = {Verdict.OK: "green", Verdict.HINT: "yellow", Verdict.MISSING: "bold red"}
    counts: Counter[Verdict] = Counter()
    values = []

    def show(line: Text) -> None:
        if not as_json:
            print(render([line]), end="", flush=True)

    for title, findings in examine():
        show(Text(title, HEADING))
        for finding in findings:
            verdict = (f"{finding.verdict.value:<8}", styles[finding.verdict])
            show(Text.assemble("  ", verdict, f" {finding.name:<22} {finding.text}"))
            counts[finding.verdict] += 1
            about = {"section": title, "name": finding.name, "text": finding.text}
            values.append({"verdict": finding.verdict.value, **about})
    missing, hints = counts[Verdict.MISSING], counts[Verdict.HINT]
    if as_json:
        print_json({"missing": missing, "hints": hints, "findings": values})
    else:
        print(f"{missing} missing, {counted(hints, 'hint')}")
    return 1 if missing else 0
