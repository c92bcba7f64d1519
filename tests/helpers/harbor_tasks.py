"""Tasks of Harbor, and agents of its kind that ask for the sum of digits."""

from __future__ import annotations

from pathlib import Path

TOML = """
schema_version = "1.4"
[agent]
timeout_sec = {agent_s}
[verifier]
timeout_sec = {verifier_s}
[environment]
build_timeout_sec = 300.0
"""
CHECK = '[ "$(cat /app/answer.txt)" = 42 ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt'
AGENT = """
import shlex
from harbor.agents.base import BaseAgent
from openai import AsyncOpenAI

class Adder(BaseAgent):
    @staticmethod
    def name():
        return "adder"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        url, key = self.extra_env["OPENAI_BASE_URL"], self.extra_env["OPENAI_API_KEY"]
        messages = [{"role": "user", "content": instruction}]
        # A client that is only dropped leaves its sockets' numbers in the event loop, which then misses other events.
        async with AsyncOpenAI(base_url=url, api_key=key) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
                said = answer.choices[0].message
                await environment.exec(f"echo {shlex.quote(said.content)} >>answer.txt")
                messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "+1="}]

class Broken(Adder):
    async def run(self, instruction, environment, context):
        raise RuntimeError("no such device")
"""


def write_task(
    folder: Path,
    test: str = CHECK,
    more: str = "",
    *,
    instruction: str = "20+22=",
    agent_s: float = 300,
    verifier_s: float = 300,
) -> None:
    files = {
        "task.toml": TOML.format(agent_s=agent_s, verifier_s=verifier_s) + more,
        "instruction.md": instruction,
        "environment/numbers.txt": "20 22",
        "solution/solve.sh": "#!/bin/bash\nread left right <numbers.txt; echo $((left + right)) >answer.txt",
        "tests/test.sh": f"#!/bin/bash\n{test}",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
