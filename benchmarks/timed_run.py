"""`dagrl` with workers whose engines only wait: everything else is a real run. Started by `overhead`.

    python -m timed_run [--profile FILE] run PIPELINE [--run-dir DIR]

With --profile, what the driver's main thread does goes to FILE, for the standard library's pstats.
"""

from __future__ import annotations

import cProfile
import sys
from pathlib import Path
from unittest import mock

from timed_engines import TimedWorker

from dagrl import cli


def main(arguments: list[str]) -> int:
    """What the command line of dagrl does, with such workers."""
    profile = Path(arguments[1]) if arguments[:1] == ["--profile"] else None
    with mock.patch("dagrl.orchestrator.groups.slots.Worker", TimedWorker):
        if profile is None:
            return cli.main(arguments)
        profiler = cProfile.Profile()
        try:
            return profiler.runcall(cli.main, arguments[2:])
        finally:
            profiler.dump_stats(profile)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
