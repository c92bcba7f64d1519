"""``python``: programs of the policy's, each in a sandbox of its own (`dagrl.rewards.sandbox`)."""

from __future__ import annotations

from dagrl.graph.plugins.tool import ToolUnavailableError, tool
from dagrl.rewards.sandbox import Outcome, run


@tool
def python(code: str, *, timeout_s: float = 10.0, memory_mib: int = 1024) -> str:
    """Run a Python program and read what it prints.

    Each program starts anew, without network, in an empty folder. Only what it prints is seen.
    """
    try:
        result = run(code, timeout_s=timeout_s, memory_mib=memory_mib)
    except OSError as error:
        raise ToolUnavailableError(f"the tool python cannot run programs here: {error}") from error
    told = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.outcome is Outcome.TIMED_OUT:
        told.append(f"The program was ended after {timeout_s:g} s.")
    elif result.outcome is Outcome.TOO_MUCH:
        told.append("The program was ended: it wrote too much, or started too many threads.")
    elif not any(told):
        told.append(
            "The program has printed nothing." if result.finished else f"It has exited with {result.exit_status}."
        )
    return "\n".join(part for part in told if part)
