"""An MCP server for `agent_search.yaml`: finds solved problems with many words of a query."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from mcp.server.fastmcp import FastMCP

SOLVED = Path(__file__).parents[1] / "data" / "gsm8k" / "test.parquet"
server = FastMCP("library", log_level="ERROR")


@server.tool()
def search(query: str, count: int = 2) -> str:
    """Solved problems like the query, the most similar one first."""
    words = set(query.lower().split())
    rows = pq.read_table(SOLVED, columns=["prompt", "reward_model"]).to_pylist()
    rows.sort(key=lambda row: -len(words & set(row["prompt"][-1]["content"].lower().split())))
    found = rows[: min(count, 5)]
    return "\n".join(f"{row['prompt'][-1]['content']} Answer: {row['reward_model']['ground_truth']}" for row in found)


if __name__ == "__main__":
    server.run()
