"""Starts the processes of Ray that a run needs, without waiting for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dagrl.workers.listener import listen

_NO_PORT = -1
"""Ray's own dashboard agents report this for what they do not serve."""


@contextmanager
def quick_start() -> Iterator[None]:
    """Within the context, Ray starts on this machine alone, without autoscaler, log monitor and dashboard.

    All of its ports are on the loopback interface: `ray.init` has no option for that, and replaces 127.0.0.1 by the
    machine's address, so that other machines could reach them.

    Less to start saves two seconds of CPU time. `ray start` has switches for some; `ray.init` does not pass them on.

    Ray's raylet waits for the ports of two agents that it starts, and ends after 15 seconds, for which there is no
    option: a busy machine takes longer to import them. Here it is told the ports, and waits for neither.
    """
    from ray import _raylet
    from ray._private import node, parameter, ray_constants, services

    raylet: Any = _raylet  # compiled: its functions are unknown to a type checker
    parameters, start, start_server = parameter.RayParams, node.Node.start_ray_processes, services.start_api_server
    remote = ray_constants.ENABLE_RAY_CLUSTER
    ports = raylet.METRICS_AGENT_PORT_NAME, raylet.METRICS_EXPORT_PORT_NAME, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME

    def start_ray_processes(self: Any) -> None:
        for name in ports:
            raylet.persist_port(self.get_session_dir_path(), self.node_id, name, _NO_PORT)
        self._ray_params.runtime_env_agent_port = _free_port()
        start(self)

    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    node.Node.start_ray_processes = start_ray_processes
    services.start_api_server = lambda *_, **__: ("", None)  # address and process
    ray_constants.ENABLE_RAY_CLUSTER = False  # as on systems where Ray has no clusters of several machines
    try:
        yield
    finally:
        parameter.RayParams, node.Node.start_ray_processes = parameters, start
        services.start_api_server, ray_constants.ENABLE_RAY_CLUSTER = start_server, remote


def _free_port() -> int:
    with listen("127.0.0.1") as free:
        port: int = free.getsockname()[1]
        return port
