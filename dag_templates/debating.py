"""The debate of `agent_debate.yaml`."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from openai import AsyncOpenAI

_AGAIN = (
    "Others have solved the problem like this:\n\n{others}\n\nSay where they or you are wrong, and end with your final "
    "answer after ####."
)


async def debate(client: AsyncOpenAI, row: dict[str, Any], *, debaters: int = 3) -> dict[str, float]:
    """Two rounds; the reward is the share of debaters whose last answer is right."""

    async def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=400)
        return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]

    def named(number: int) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"You are debater {number} of {debaters}."}, *row["messages"]]

    first = await asyncio.gather(*(ask(named(number)) for number in range(1, debaters + 1)))

    async def again(number: int) -> list[dict[str, Any]]:
        others = "\n\n".join(each[-1]["content"] for place, each in enumerate(first) if place != number)
        return await ask([*first[number], {"role": "user", "content": _AGAIN.format(others=others)}])

    second = await asyncio.gather(*map(again, range(debaters)))
    before, after = (sum(_right(each, row["answer"]) for each in talks) / debaters for talks in (first, second))
    return {"reward": after, "convinced": after - before}


def _right(messages: list[dict[str, Any]], answer: str) -> bool:
    numbers = re.findall(r"####\s*(-?[\d,]+)", messages[-1]["content"])
    return bool(numbers) and numbers[-1].replace(",", "") == answer.replace(",", "")
