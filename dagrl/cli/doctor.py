"""`dagrl doctor`."""

from __future__ import annotations

from collections import Counter


def doctor() -> int:
    """Report what this machine can run, and what is missing.

    Prints a line for each check: `ok`, `hint` or `missing`. Exits 1 where something is missing that runs need.
    """
    from rich.text import Text

    from dagrl.doctor.examination import examine
    from dagrl.doctor.findings import Verdict
    from dagrl.tables import HEADING, render

    styles = {Verdict.OK: "green", Verdict.HINT: "yellow", Verdict.MISSING: "bold red"}
    found: Counter[Verdict] = Counter()
    for title, findings in examine():
        print(render([Text(title, HEADING)]), end="", flush=True)
        for each in findings:
            verdict = (f"{each.verdict.value:<8}", styles[each.verdict])
            print(render([Text.assemble("  ", verdict, f" {each.name:<22} {each.text}")]), end="", flush=True)
            found[each.verdict] += 1
    hints = found[Verdict.HINT]
    print(f"{found[Verdict.MISSING]} missing, {hints} hint{'' if hints == 1 else 's'}")
    return 1 if found[Verdict.MISSING] else 0
