"""A process that calls `dagrl` in children of its own, each with bounds on memory, CPU time and wall time.

Reads one JSON list of arguments a line, answers with one JSON object a line. The imports happen
once, before the bounds.
"""

import json
import os
import resource
import sys
import tempfile
import time

from dagrl.cli import main
from dagrl.resources import OWN_TEMPLATES
from dagrl.validation import check_file

MEMORY = 2**30
CPU_S = 3
WALL_S = 30


def call(arguments: list[str]) -> dict:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            code = 99
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code
            except BaseException as error:  # noqa: BLE001 (any that gets here is a defect to report)
                print(f"Traceback: {error!r}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        deadline = time.monotonic() + WALL_S
        while (ended := os.wait4(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        if ended[0] == 0:
            os.kill(child, 9)
            ended = os.wait4(child, 0)
        out.seek(0)
        err.seek(0)
        return {
            "code": os.waitstatus_to_exitcode(ended[1]),
            "out": out.read().decode(errors="replace"),
            "err": err.read().decode(errors="replace"),
        }


check_file(OWN_TEMPLATES / "tiny_grpo.yaml", with_files=False)
for line in sys.stdin:
    print(json.dumps(call(json.loads(line))), flush=True)
