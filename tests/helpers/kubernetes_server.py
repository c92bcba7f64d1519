"""A server of the part of Kubernetes' API that sandboxes use. Its pods are folders, where commands run as processes.

``python kubernetes_server.py FOLDER`` writes the kubeconfig `config` into that folder, and serves until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

NOT_FOUND = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}


class Cluster:
    """Pods that start after some looks at them, and end at their deadline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, dict[str, Any]] = {}
        self.policies: set[str] = set()
        self.begun: dict[str, float] = {}
        self.processes: dict[str, list[asyncio.subprocess.Process]] = {}

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"] = f"{pod['metadata']['generateName']}{uuid.uuid4().hex[:8]}"
        (self.folder / name).mkdir()
        self.pods[name], self.begun[name], self.processes[name] = pod, time.monotonic(), []
        pod["status"] = {"phase": "Pending"}
        return web.json_response(pod, status=201)

    async def show(self, request: web.Request) -> web.Response:
        if (pod := self.pods.get(request.match_info["name"])) is None:
            return web.json_response(NOT_FOUND, status=404)
        answer = json.dumps(pod)
        if "no-such-image" in pod["spec"]["containers"][0]["image"]:
            waiting = {"reason": "ErrImagePull", "message": "no such image"}
            status = {"name": "sandbox", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
            pod["status"]["containerStatuses"] = [{**status, "state": {"waiting": waiting}}]
        else:
            pod["status"]["phase"] = "Running"
        return web.Response(text=answer, content_type="application/json")

    async def pods_of(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(key) == value]
        return web.json_response({"kind": "PodList", "items": found})

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.pods.pop(name, None) is None:
            return web.json_response(NOT_FOUND, status=404)
        for process in self.processes.pop(name):
            if process.returncode is None:
                process.kill()
        return web.json_response({"kind": "Pod", "metadata": {"name": name}})

    async def policy(self, request: web.Request) -> web.Response:
        name = (await request.json())["metadata"]["name"]
        if name in self.policies:
            return web.json_response({"kind": "Status", "code": 409}, status=409)
        self.policies.add(name)
        return web.json_response({"metadata": {"name": name}}, status=201)

    async def execute(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.pods:
            return web.json_response(NOT_FOUND, status=404)
        connection = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await connection.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            stdin=asyncio.subprocess.PIPE if request.query["stdin"] == "true" else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder / name,
            start_new_session=True,
        )
        self.processes[name].append(process)

        async def receive() -> None:
            async for message in connection:
                if message.type == WSMsgType.BINARY and process.stdin is not None:
                    process.stdin.write(message.data[1:])
            if process.returncode is None:
                process.kill()

        async def send(channel: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(1 << 15):
                await connection.send_bytes(bytes([channel]) + data)

        receiving = asyncio.create_task(receive())
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(send(1, process.stdout), send(2, process.stderr))
        code = await process.wait()
        causes = {"causes": [{"reason": "ExitCode", "message": str(code if code >= 0 else 128 - code)}]}
        failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes}
        await connection.send_bytes(b"\3" + json.dumps(failed if code else {"status": "Success"}).encode())
        await connection.close()
        receiving.cancel()
        return connection


async def serve(folder: Path) -> None:
    cluster, pods = Cluster(folder), "/api/v1/namespaces/tests/pods"
    app = web.Application()
    app.add_routes(
        [
            web.post(pods, cluster.create),
            web.get(pods, cluster.pods_of),
            web.get(f"{pods}/{{name}}", cluster.show),
            web.delete(f"{pods}/{{name}}", cluster.delete),
            web.get(f"{pods}/{{name}}/exec", cluster.execute),
            web.post("/apis/networking.k8s.io/v1/namespaces/tests/networkpolicies", cluster.policy),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    named = {"name": "tests", "cluster": {"server": f"http://127.0.0.1:{address[1]}"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [named],
        "users": [{"name": "tests", "user": {}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
    }
    (folder / "writing").write_text(json.dumps(config))
    (folder / "writing").rename(folder / "config")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
