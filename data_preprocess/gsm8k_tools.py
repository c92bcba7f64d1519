"""GSM8K for a model that may call tools: python data_preprocess/gsm8k_tools.py --local_dir data/gsm8k_tools.

The questions of gsm8k.py (same originals, same options) with a system message that tells of the tool, and with what
verl's tool agent reads: agent_name, extra_info.need_tools_kwargs, extra_info.tools_kwargs. extra_info.tools names the
tools that a rollout should offer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gsm8k
import pyarrow as pa

from dagrl.data.prepare import DataSet, Drop, Record, run
from dagrl.data.prompt_file import PromptRow

TOOL = "calculator"
SYSTEM = (
    f"You solve problems step by step. You may call the tool `{TOOL}` for any calculation, as often as you need, "
    "before you answer."
)


def make_row(record: Record, instruction: str) -> PromptRow | Drop:
    row = gsm8k.make_row(record, instruction)
    if isinstance(row, Drop):
        return row
    extra_info = {
        **row.extra_info,
        "tools": [TOOL],
        "need_tools_kwargs": True,
        "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": row.answer}}},
    }
    assert isinstance(row.prompt, str)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row.prompt}]
    return replace(row, prompt=chat, extra_info=extra_info, columns={"agent_name": "tool_agent"})


GSM8K_TOOLS: DataSet = replace(
    gsm8k.GSM8K,
    name="gsm8k_tools",
    title=__doc__ or "",
    make_row=make_row,
    extra_info={
        **gsm8k.GSM8K.extra_info,
        "tools": pa.list_(pa.string()),
        "need_tools_kwargs": pa.bool_(),
        "tools_kwargs": pa.struct({TOOL: pa.struct({"create_kwargs": pa.struct({"ground_truth": pa.string()})})}),
    },
    columns={"agent_name": pa.string()},
)

main = partial(run, GSM8K_TOOLS)

if __name__ == "__main__":
    main()
