"""Ray's head, as a process of its own under the leader: starts it, says who is there, ends it when its stdin closes.

Not `ray start --head`, which opens a port for Ray's client as well. Prints JSON lines: ``{"address": ...}`` once, then
``{"alive": [address, ...]}`` whenever that changes.
"""

from __future__ import annotations

import json
import select
import sys

_PAUSE_S = 0.5
_HEALTH = {"health_check_period_ms": 3000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""A machine that is cut off is dead to Ray after some 25 s instead of more than a minute."""


def main() -> None:
    """Run until stdin closes."""
    import ray

    told = json.loads(sys.argv[1])
    context = ray.init(
        address="local",
        _node_ip_address=told["address"],
        _temp_dir=told["folder"],
        _system_config=_HEALTH,
        num_cpus=told["cpus"],
        num_gpus=told["gpus"],
        object_store_memory=told["object_store"],
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="dagrl",
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
