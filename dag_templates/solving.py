"""A command-line agent for `agent_command.yaml`: it asks, lets the policy check its answer, and grades the last one."""

from __future__ import annotations

import json
import os
import re
import sys

from openai import OpenAI

CHECK = "Check each step. If something is wrong, correct it. End with the final answer after ####."


def main() -> None:
    """Solve the task on standard input, and write the reward to the file that dagrl names."""
    row = json.load(sys.stdin)
    client, messages = OpenAI(), list(row["messages"])
    for question in (None, CHECK):
        if question:
            messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=400)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    numbers = re.findall(r"####\s*(-?[\d,]+)", messages[-1]["content"])
    right = bool(numbers) and numbers[-1].replace(",", "") == row["answer"].replace(",", "")
    with open(os.environ["DAGRL_RESULT"], "w") as file:  # noqa: PTH123 - a program as users have them
        json.dump({"reward": float(right), "answered": bool(numbers)}, file)


if __name__ == "__main__":
    main()
