"""`dagrl doctor`."""

from __future__ import annotations


def doctor() -> int:
    """Report what this machine can run, and what is missing.

    Prints a line for each thing it examines: `ok`, `hint` or `missing`. Exits 1 where something is missing that runs
    need.
    """
    from dagrl.doctor.command import examine
    from dagrl.doctor.probe import Edges

    return examine(Edges(), lambda line: print(line, flush=True))
