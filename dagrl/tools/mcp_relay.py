"""Runs an MCP server, and ends it when it sends a longer message than the client may keep, or when the client ends.

``python -I -S mcp_relay.py CLIENT MOST_BYTES COMMAND...``. Imports the standard library only, so that it starts fast.
"""

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _relay(most: int, command: list[str]) -> int:
    """Pass the server's lines on. Returns its exit status."""
    try:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_end_with_parent)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    assert server.stdout is not None
    while line := server.stdout.readline(most):
        if len(line) == most and not line.endswith(b"\n"):
            print(f"it sent a message of more than {most:,} bytes, and was ended", file=sys.stderr)
            server.kill()
            break
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    # Only the server reads the client's messages, and it ends with the last one.
    return server.wait()


if __name__ == "__main__":
    _end_with_parent()
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    sys.exit(_relay(int(sys.argv[2]), sys.argv[3:]))
