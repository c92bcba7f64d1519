"""``python``: runs the policy's programs, each in its own sandbox (`dagrl.rewards.sandbox`)."""

from __future__ import annotations

from dagrl.plugins.tool import ToolUnavailableError, tool
from dagrl.rewards.sandbox import Outcome, run


@tool
def python(code: str, *, timeout_s: float = 10.0, memory_mib: int = 1024) -> str:
    """Run a Python program and return its output.

    Each program starts in a new process, without network, in an empty folder. Only its printed output is returned.
    """
    try:
        result = run(code, timeout_s=timeout_s, memory_mib=memory_mib)
    except OSError as error:
        raise ToolUnavailableError(f"the tool python cannot run programs here: {error}") from error
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.outcome is Outcome.TIMED_OUT:
        parts.append(f"The program was stopped after {timeout_s:g} s.")
    elif result.outcome is Outcome.TOO_MUCH:
        parts.append("The program was stopped: it wrote too much, or started too many threads.")
    elif not any(parts):
        parts.append(
            "The program printed nothing." if result.finished else f"It exited with status {result.exit_status}."
        )
    return "\n".join(part for part in parts if part)
