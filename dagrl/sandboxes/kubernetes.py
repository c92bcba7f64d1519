"""Sandboxes in pods of a Kubernetes cluster. Commands run through the API server, by WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.stream import WsApiClient

from dagrl.environments.failures import EnvironmentFailedError, FailureClass
from dagrl.sandboxes.sandbox import READ_BYTES, RawResult, SandboxRequest, ShellSandbox

_LABEL, _NETWORK = "dagrl/sandbox", "dagrl/network"
_CONTAINER = "sandbox"
_POLICY = "dagrl-no-network"
_LOOK_EVERY_S, _CLOSE_S = 0.5, 20.0
_CHUNK_BYTES = 64 << 10
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_NEVER_STARTS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerError",
    "CreateContainerConfigError",
)
_CONFLICT, _NOT_FOUND = 409, 404


class KubernetesProvider:
    """Pods of a namespace, which the cluster ends at their time."""

    def __init__(
        self,
        label: str,
        *,
        namespace: str = "default",
        context: str | None = None,
        runtime_class: str | None = None,
        pod: dict[str, Any] | None = None,
    ) -> None:
        """`context` is one of the kubeconfig; without a kubeconfig, the service account of this pod is used.
        `runtime_class` is one of the cluster, such as ``gvisor``. `pod` has further fields of the pods' specification.
        """
        self._label, self._namespace, self._context = label, namespace, context
        self._spec = {**(pod or {}), **({"runtimeClassName": runtime_class} if runtime_class else {})}
        self._opening = asyncio.Lock()
        self._clients: list[Any] = []

    async def start(self, request: SandboxRequest) -> KubernetesSandbox:
        async with _failing("start"):
            api, exec_api = await self._apis()
            pod = await api.create_namespaced_pod(self._namespace, self._manifest(request))
            sandbox = KubernetesSandbox(api, exec_api, pod.metadata.name, self._namespace)
            try:
                await sandbox.running()
                await sandbox.check()
            except BaseException:
                await asyncio.shield(sandbox.close())
                raise
        return sandbox

    async def sweep(self) -> int:
        async with _failing("network"):
            api, _ = await self._apis()
            pods = (await api.list_namespaced_pod(self._namespace, label_selector=f"{_LABEL}={self._label}")).items
            await asyncio.gather(*(_delete(api, pod.metadata.name, self._namespace) for pod in pods))
            return len(pods)

    async def close(self) -> None:
        for opened in self._clients:
            await opened.close()

    async def _apis(self) -> tuple[Any, Any]:
        async with self._opening:
            if not self._clients:
                settings = client.Configuration()
                try:
                    await config.load_kube_config(context=self._context, client_configuration=settings)
                except config.ConfigException:
                    config.load_incluster_config(client_configuration=settings)
                # Each running command is a connection.
                settings.connection_pool_maxsize = 0
                self._clients = [client.ApiClient(settings), WsApiClient(settings)]
                await self._forbid_network()
        return tuple(client.CoreV1Api(opened) for opened in self._clients)

    async def _forbid_network(self) -> None:
        """Make the policy that applies to pods without network. It stays in the namespace."""
        selected = {"podSelector": {"matchLabels": {_NETWORK: "off"}}, "policyTypes": ["Ingress", "Egress"]}
        policy = {"metadata": {"name": _POLICY}, "spec": selected}
        try:
            await client.NetworkingV1Api(self._clients[0]).create_namespaced_network_policy(self._namespace, policy)
        except client.ApiException as error:
            if error.status != _CONFLICT:
                raise

    def _manifest(self, request: SandboxRequest) -> dict[str, Any]:
        given = {"cpu": request.cpus and str(request.cpus), "memory": request.memory_mib and f"{request.memory_mib}Mi"}
        limits = {name: value for name, value in given.items() if value}
        container = {
            "name": _CONTAINER,
            "image": request.image,
            # A shell, because the first process takes over those whose parents end.
            "command": ["sh", "-c", f"sleep {int(request.lifetime_s)} & wait $!"],
            "resources": {"limits": limits, "requests": limits},
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        labels = {_LABEL: self._label, _NETWORK: "on" if request.network else "off"}
        spec = {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(request.lifetime_s),
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
        }
        return {"metadata": {"generateName": "dagrl-", "labels": labels}, "spec": spec | self._spec}


PROVIDER = KubernetesProvider


class KubernetesSandbox(ShellSandbox):
    """A pod."""

    def __init__(self, api: Any, exec_api: Any, name: str, namespace: str) -> None:
        self._api, self._exec_api, self._name, self._namespace = api, exec_api, name, namespace

    async def running(self) -> None:
        while True:
            status = (await self._api.read_namespaced_pod(self._name, self._namespace)).status
            if status.phase == "Running":
                return
            waiting = [each.state.waiting for each in status.container_statuses or () if each.state.waiting]
            reasons = [f"{each.reason}: {each.message}" for each in waiting if each.reason in _NEVER_STARTS]
            if status.phase in ("Failed", "Succeeded") or reasons:
                told = "; ".join(reasons) or status.message or status.reason or "it has ended"
                raise EnvironmentFailedError("start", f"the pod {self._name} does not start: {told}"[:500])
            await asyncio.sleep(_LOOK_EVERY_S)

    async def run(self, command: list[str], stdin: bytes) -> RawResult:
        async with _failing("exec"):
            connection = await self._exec_api.connect_get_namespaced_pod_exec_without_preload_content(
                self._name,
                self._namespace,
                container=_CONTAINER,
                command=command,
                stdin=bool(stdin),
                stdout=True,
                stderr=True,
                tty=False,
            )
            outputs = {_STDOUT: bytearray(), _STDERR: bytearray(), _STATUS: bytearray()}
            async with connection as socket:
                for begin in range(0, len(stdin), _CHUNK_BYTES):
                    await socket.send_bytes(b"\0" + stdin[begin : begin + _CHUNK_BYTES])
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.BINARY and message.data:
                        output = outputs.setdefault(message.data[0], bytearray())
                        output += message.data[1:]
                        if len(output) > 2 * READ_BYTES:
                            raise EnvironmentFailedError("exec", "the cluster sent more than the command wrote")
                    if outputs[_STATUS]:
                        break
            return RawResult(_exit_code(bytes(outputs[_STATUS])), bytes(outputs[_STDOUT]), bytes(outputs[_STDERR]))

    async def close(self) -> None:
        await _delete(self._api, self._name, self._namespace)


def _exit_code(status: bytes) -> int:
    """The exit code in the last message about a command."""
    if not status:
        raise EnvironmentFailedError("exec", "the connection ended before the command")
    told = json.loads(status)
    if told.get("status") == "Success":
        return 0
    if told.get("reason") == "NonZeroExitCode":
        return int(told["details"]["causes"][0]["message"])
    raise EnvironmentFailedError("exec", f"the cluster could not run a command: {told.get('message')}"[:500])


async def _delete(api: Any, name: str, namespace: str) -> None:
    # It may be gone, or the cluster is out of reach: its time ends it then.
    with suppress(client.ApiException, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_CLOSE_S):
            await api.delete_namespaced_pod(name, namespace, grace_period_seconds=0)


@asynccontextmanager
async def _failing(failure: FailureClass) -> AsyncIterator[None]:
    """Errors of the cluster, as failures of this class, and of the connection to it."""
    try:
        yield
    except client.ApiException as error:
        raise EnvironmentFailedError(failure, f"Kubernetes answered {error.status}: {error.body}"[:500]) from error
    except config.ConfigException as error:
        raise EnvironmentFailedError("start", f"no Kubernetes cluster is configured: {error}"[:500]) from error
    except aiohttp.WSServerHandshakeError as error:
        kind: FailureClass = "exec" if error.status == _NOT_FOUND else "network"
        raise EnvironmentFailedError(kind, f"Kubernetes refused a command: {error.message}"[:500]) from error
    except (aiohttp.ClientError, ConnectionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFailedError("network", f"no answer of Kubernetes: {error!r}"[:500]) from error
