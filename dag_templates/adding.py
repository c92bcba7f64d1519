"""An agent for `tiny_agent.yaml`: asks once, and compares."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def solve(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Return the reward of one attempt at a sum."""
    answer = await client.chat.completions.create(model="policy", messages=row["messages"])
    return float(answer.choices[0].message.content == row["answer"])
