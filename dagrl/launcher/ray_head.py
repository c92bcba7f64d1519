"""Ray's head as a child process of rank 0: prints the machines that are alive, and ends when its stdin closes.

`ray start --head` would also open a port for Ray's client. Prints JSON lines: ``{"address": ...}`` once, then
``{"alive": [address, ...]}`` at each change.
"""

from __future__ import annotations

import json
import select
import sys

from dagrl.orchestrator.cluster.session import quick_start

_PAUSE_S = 0.5
_HEALTH = {"health_check_period_ms": 3000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""Ray declares a disconnected machine dead after about 25 s, instead of more than a minute."""


def main() -> None:
    import ray

    with quick_start():
        context = ray.init(
            address="local",
            _system_config=_HEALTH,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            namespace="dagrl",
            **json.loads(sys.argv[1]),
        )
    print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
    known: list[str] = []
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        if alive != known:
            known = alive
            print(json.dumps({"alive": alive}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
