"""Requests to the servers of environments, which may answer with anything."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx

from dagrl.bounded_http import BoundedClient
from dagrl.environments.failures import EnvironmentFailedError


class Service(BoundedClient):
    """A client of one server, with the cookies of one episode."""

    def __init__(self, url: str, timeout_s: float) -> None:
        # Without certificates, whose loading takes 20 ms for each client, where none are needed.
        super().__init__(timeout_s, base_url=url, trust_env=False, verify=url.startswith("https:"))
        self._timeout_s = timeout_s

    async def ask(self, method: str, path: str, body: object = None) -> httpx.Response:
        """Raises EnvironmentFailedError if there is no answer in time, or none that can be read."""
        where = f"{self.base_url.join(path)}"
        try:
            async with asyncio.timeout(self._timeout_s):
                if body is None:
                    return await self.request(method, path)
                # Unlike httpx, in ASCII: the policy may write half of a surrogate pair.
                content, headers = json.dumps(body), {"Content-Type": "application/json"}
                return await self.request(method, path, content=content, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EnvironmentFailedError("timeout", f"{where} took longer than {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EnvironmentFailedError("network", f"{where}: {str(error) or type(error).__name__:.200}") from error

    async def object(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The JSON object of an answer with status 200. Raises EnvironmentFailedError for any other."""
        answer = await self.ask(method, path, body)
        where = f"{self.base_url.join(path)}"
        if answer.status_code != httpx.codes.OK:
            raise EnvironmentFailedError("network", f"{where} answers {answer.status_code}: {answer.text[:200]!r}")
        try:
            value = json.loads(answer.content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise EnvironmentFailedError("network", f"{where} answers with no JSON object: {answer.text[:200]!r}")
        return value


def number(value: object) -> float | None:
    """A finite number of an answer; None for anything else."""
    if not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_text(value: object) -> str:
    """A value of an answer as text for the policy, JSON if it is none."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # An escape in JSON may be half of a surrogate pair, which no request can hold.
    return text.encode(errors="replace").decode()
