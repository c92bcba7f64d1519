"""Sandboxes of each provider, for tests of what all of them do."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagrl.sandboxes.pool import load_provider
from dagrl.sandboxes.sandbox import Provider, Sandbox, SandboxRequest

LIMIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """A provider, and requests that it takes."""

    name: str
    args: dict[str, Any]
    image: str | None = None

    def provider(self, label: str | None = None) -> Provider:
        return load_provider(self.name, label or f"test-{uuid.uuid4().hex[:12]}", self.args)

    def request(self, **options: Any) -> SandboxRequest:
        return SandboxRequest(image=self.image, **{"memory_mib": 512, "lifetime_s": 120.0, **options})

    def use(self, test: Callable[[Sandbox], Awaitable[Any]], **options: Any) -> Any:
        """Run `test` in a sandbox."""

        async def run() -> Any:
            provider = self.provider()
            async with asyncio.timeout(LIMIT_S):
                sandbox = await provider.start(self.request(**options))
                try:
                    return await test(sandbox)
                finally:
                    await sandbox.close()
                    await provider.close()

        return asyncio.run(run())


@pytest.fixture(params=["local", "docker", "kubernetes"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(f"{request.param}_case")


@pytest.fixture
def local_case() -> Case:
    return Case("local", {})


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A Podman that serves Docker's protocol: its address, and an image of busybox alone."""
    busybox = shutil.which("busybox")
    if shutil.which("podman") is None or shutil.which("runc") is None or busybox is None or os.getuid():
        pytest.skip("needs root, podman, runc and busybox-static")
    folder = tmp_path_factory.mktemp("podman")
    # Machines of CI allow no higher limits, and have the two versions of cgroups at once.
    settings = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\n'
    (folder / "containers.conf").write_text(settings)
    environment = os.environ | {"CONTAINERS_CONF": str(folder / "containers.conf")}
    root = folder / "root"
    for name in ("bin", "tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for program in subprocess.check_output([busybox, "--list"], text=True).split():
        if program != "busybox":
            (root / "bin" / program).symlink_to("busybox")
    image = "localhost/dagrl-tests:busybox"
    with tarfile.open(folder / "root.tar", "w") as archive:
        archive.add(root, "/")
    subprocess.run(["podman", "import", "--quiet", folder / "root.tar", image], check=True, capture_output=True)
    address = f"unix://{folder}/socket"
    server = subprocess.Popen(["podman", "system", "service", "--time", "0", address], env=environment)
    _wait_for(folder / "socket", server)
    yield address, image
    server.terminate()
    server.wait()


@pytest.fixture
def docker_case(podman: tuple[str, str]) -> Case:
    pytest.importorskip("aiodocker")
    return Case("docker", {"url": podman[0]}, podman[1])


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("kubernetes")
    server = subprocess.Popen([sys.executable, Path(__file__).parents[1] / "helpers/kubernetes_server.py", folder])
    _wait_for(folder / "config", server)
    yield folder / "config"
    server.kill()
    server.wait()


@pytest.fixture
def kubernetes_case(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    pytest.importorskip("kubernetes.aio")
    # Read when the package is imported, which another test may have done.
    loader = importlib.import_module("kubernetes.aio.config.kube_config")
    monkeypatch.setattr(loader, "KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig))
    return Case("kubernetes", {"namespace": "tests"}, "busybox")


def _wait_for(file: Path, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT_S
    while not file.exists():
        assert server.poll() is None
        assert time.monotonic() < end, f"no {file}"
        time.sleep(0.05)
