"""gsm8k_tools.py: gsm8k.py's rows with a tool."""

from __future__ import annotations


def test_rows_name_their_tool(originals, prepared) -> None:
    lines = [{"question": "1+1?", "answer": "#### 2"}, {"question": "?", "answer": "none"}]
    (row,) = prepared("gsm8k_tools", originals(train_DOT_jsonl=lines), "--splits", "train", "--instruction", "Go.")[
        "train"
    ]
    system, user = row["prompt"]
    assert (system["role"], user) == ("system", {"role": "user", "content": "1+1? Go."})
    assert "`calculator`" in system["content"]
    assert row["agent_name"] == "tool_agent"
    assert row["extra_info"] == {
        "split": "train",
        "index": 0,
        "question": "1+1?",
        "answer": "#### 2",
        "tools": ["calculator"],
        "need_tools_kwargs": True,
        "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "2"}}},
    }
