"""Sandboxes of each provider, for tests of what all of them do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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


@pytest.fixture(params=["local"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(f"{request.param}_case")


@pytest.fixture
def local_case() -> Case:
    return Case("local", {})
