"""Joins this machine to a Ray cluster until it is terminated: `ray start --block` with the arguments of this program.

`ray start` alone gives up where it takes more than 15 seconds to import Ray's agents, as from a shared file system that
many machines read at once.
"""

from __future__ import annotations

import sys

from dagrl.orchestrator.cluster.session import quick_start


def main() -> None:
    from ray.scripts.scripts import cli

    with quick_start(alone=False):
        cli(["start", "--block", *sys.argv[1:]])


if __name__ == "__main__":
    main()
