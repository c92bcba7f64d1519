"""The endpoint under load: many open conversations with an engine that takes its time, and what a request costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from scripted_policy import Policy, session_of

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.ops.agents.gateway import Gateway
from dagrl.ops.agents.session import Session

TURNS = 8
REPLY = "I look for the next word in the list, and find it. "
CPU_MS = 3.0
"""For a request, session and tokenizer included."""
GROWTH_MIB = 32
CLIENT = """
import asyncio, sys
import aiohttp

url, open_at_once, conversations, turns = sys.argv[1], *map(int, sys.argv[2:])

async def converse(http, number):
    headers = {"Authorization": f"Bearer conversation {number}"}
    messages = [{"role": "user", "content": f"Task {number}: " + "what comes next? " * 8}]
    for _ in range(turns):
        async with http.post(f"{url}/chat/completions", json={"messages": messages}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            messages.append((await answer.json())["choices"][0]["message"])
        messages.append({"role": "user", "content": "The tool has found nothing. Go on."})

async def main():
    numbers = iter(range(conversations))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async def worker():
            for number in numbers:
                await converse(http, number)
        async with asyncio.TaskGroup() as group:
            for _ in range(open_at_once):
                group.create_task(worker())

asyncio.run(main())
"""


class TimedPolicy(Policy):
    """A policy that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(lambda seen: REPLY)
        self._seconds = seconds
        self.replies = self.waiting = self.most_waiting = 0

    async def ask(self, request: GenerationRequest) -> Completion:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await asyncio.sleep(self._seconds)
        self.waiting -= 1
        self.replies += 1
        reply = await super().ask(request)
        self.asked.clear()
        self.sampled.clear()
        return reply


class Conversations(dict[str, Session]):
    """The sessions of an endpoint, each opened by its first request and closed by its last."""

    def __init__(self, policy: TimedPolicy) -> None:
        super().__init__()
        self.policy, self.most_open = policy, 0

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = session_of(self.policy)
            self.most_open = max(self.most_open, len(self))
        session = self[key]
        if len(session.tree.exchanges) == TURNS - 1:
            del self[key]
        return session


@pytest.mark.parametrize(
    ("open_at_once", "conversations"),
    [(100, 100), pytest.param(2000, 12_500, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_many_conversations_cost_little_each(open_at_once: int, conversations: int, capsys) -> None:
    gateway = Gateway("127.0.0.1")
    policy = TimedPolicy(0.5 if open_at_once < 1000 else 5.0)
    gateway._sessions = sessions = Conversations(policy)
    requests = conversations * TURNS
    begun, cpu_s = time.monotonic(), _thread_seconds(gateway)
    counts = map(str, (open_at_once, conversations, TURNS))
    client = subprocess.Popen([sys.executable, "-c", CLIENT, gateway.url, *counts])
    memory: list[float] = []
    while client.poll() is None:
        time.sleep(0.2)
        memory.append(_resident_mib())
    assert client.returncode == 0 and policy.replies == requests
    each_ms = 1000 * (_thread_seconds(gateway) - cpu_s) / requests
    # All conversations are open from then on; single values depend on when Python collects garbage.
    quarter = len(memory) // 4
    warm, late = mean(memory[quarter : 2 * quarter]), mean(memory[3 * quarter :])
    with capsys.disabled():
        print(
            f"\n{requests} requests in {time.monotonic() - begun:.0f} s, {sessions.most_open} conversations open, "
            f"{policy.most_waiting} requests waiting: {each_ms:.2f} ms of CPU each, {warm:.0f} MiB in the "
            f"second quarter, {late:.0f} MiB in the last"
        )
    assert sessions.most_open == open_at_once and not sessions
    assert each_ms < CPU_MS
    if len(memory) > 1000:
        assert late - warm < GROWTH_MIB


def _thread_seconds(gateway: Gateway) -> float:
    """CPU time of the endpoint's thread."""

    async def seconds() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(seconds(), gateway.loop).result()


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
