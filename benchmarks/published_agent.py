"""The agent of the case `agent` of published_model.py: asks once through the official OpenAI client."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def solve(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """The reward of an answer: 1 if the number behind the last ``####`` is right."""
    answer = await client.chat.completions.create(model="policy", messages=row["messages"])
    said = (answer.choices[0].message.content or "").rpartition("####")
    return float(bool(said[1]) and said[2].strip() == row["answer"])
