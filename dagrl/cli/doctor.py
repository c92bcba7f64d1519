"""`dagrl doctor`."""

from __future__ import annotations

from collections import Counter

from dagrl.cli.parameters import AsJson, print_json


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
    found: Counter[Verdict] = Counter()
    if as_json:
        sections = [(title, list(findings)) for title, findings in examine()]
        found.update(each.verdict for _, findings in sections for each in findings)
        values = [
            {"verdict": each.verdict.value, "section": title, "name": each.name, "text": each.text}
            for title, findings in sections
            for each in findings
        ]
        print_json({"missing": found[Verdict.MISSING], "hints": found[Verdict.HINT], "findings": values})
        return 1 if found[Verdict.MISSING] else 0
    for title, findings in examine():
        print(render([Text(title, HEADING)]), end="", flush=True)
        for each in findings:
            verdict = (f"{each.verdict.value:<8}", styles[each.verdict])
            print(render([Text.assemble("  ", verdict, f" {each.name:<22} {each.text}")]), end="", flush=True)
            found[each.verdict] += 1
    hints = found[Verdict.HINT]
    print(f"{found[Verdict.MISSING]} missing, {hints} hint{'' if hints == 1 else 's'}")
    return 1 if found[Verdict.MISSING] else 0
