"""slime's data file, prompts and their length."""

from __future__ import annotations

from dagrl.importing.parts import data_file
from dagrl.importing.table import Translation, joint, to

_MOST_PROMPT = 2048


def _data(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    path = t.get("--prompt-data")
    note = "convert it once (docs/data.md)" if data_file(path) != path else ""
    t.write("data.train", data_file(path), "--prompt-data", note=note)
    for key, column in (("--input-key", "prompt"), ("--label-key", "reward_model.ground_truth")):
        t.imply(f"is the column `{column}`", key)


def _prompt_length(t: Translation) -> None:
    key, context = "--rollout-max-prompt-len", "--rollout-max-context-len"
    response = t.number("--rollout-max-response-len")
    if t.number(key):
        t.write("data.max_prompt_tokens", t.get(key), key)
        t.imply("follows from prompt and response", context)
    elif t.number(context) and response and t.number(context) > response:
        t.write("data.max_prompt_tokens", t.get(context) - response, context, note="less the response")
    else:
        packed = t.number("--max-tokens-per-gpu", 0) * t.number("--context-parallel-size", 1)
        room = packed - response if response and packed > response else _MOST_PROMPT
        bound = min(_MOST_PROMPT, room)
        t.put("data.max_prompt_tokens", bound)
        t.note(key, "data.max_prompt_tokens", f"prompts have no bound there; {bound} stands in")


RULES = (
    joint(_data, "--prompt-data --input-key --label-key", always=True),
    to("--rollout-shuffle", "data.shuffle", write_default=True),
    to("--rollout-batch-size", "data.prompts_per_step"),
    joint(_prompt_length, "--rollout-max-prompt-len --rollout-max-context-len", always=True),
)
