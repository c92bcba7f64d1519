"""Environments of verifiers for tests, as modules, and the Python that has the package."""

from __future__ import annotations

from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".agents" / "verifiers" / "bin" / "python"

ADDING = '''
"""Sums, in one or more turns by a harness in the process, or by a program in a sandbox that writes a file."""

import httpx
import verifiers.v1 as vf


class AddingData(vf.TaskData):
    answer: str


class AddingConfig(vf.TasksetConfig):
    most: int = 4


class AddingTask(vf.Task[AddingData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        if self.data.name == "file":
            return float((await runtime.read("answer.txt")).decode().strip() == self.data.answer)
        if self.data.name == "broken":
            raise ArithmeticError("no scores")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Adding(vf.Taskset[AddingTask, AddingConfig]):
    def load(self):
        for number in range(self.config.most):
            yield AddingTask(AddingData(prompt=f"{number}+1=", answer=str(number + 1)), self.config.task)


class LoopConfig(vf.HarnessConfig):
    turns: int = 2


class Loop(vf.Harness[LoopConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for _ in range(self.config.turns):
                body = {"model": ctx.model, "messages": messages, "max_tokens": 3}
                key = {"Authorization": f"Bearer {secret}"}
                answer = await client.post(f"{endpoint}/chat/completions", headers=key, json=body)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "1+1="}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Adding", "Loop"]
'''

LOOP = {"harness": {"id": "adding", "turns": 2}, "runtime": {"type": "subprocess"}}
"""The agent of `ADDING` that runs in the process."""
