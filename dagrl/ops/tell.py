"""``tell``: prompts that give a teacher more information than the policy, for self-distillation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dagrl.config.schema import TellNode
from dagrl.config.schema.nodes.tell import EXTRA_INFO
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.model_files.nested_columns import value_at
from dagrl.model_files.tokenizer import begun_text, chat_text
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import response_text
from dagrl.ops.reward import scored_text
from dagrl.ops.turns.settings import rollout_tools
from dagrl.plugins.tool import offered

type _Chat = list[dict[str, Any]]


def tell(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the teacher's prompts of each shard, int64 like ``prompt_tokens``, and a mask of the rows with added
    information.

    Other rows keep their prompts. Raises ValueError if the chat template rejects the messages.
    """
    node = context.declared(TellNode)
    written = context.resources.once(f"template of {node.template!r}", lambda: _template(node.template))
    for part in parts:
        batch = part.batch
        facts = [_facts(batch, row, node, context) for row in range(len(batch))]
        peers = _peers(batch, node.peer_reward) if node.peer_reward is not None else np.full(len(batch), -1)
        for fact, peer in zip(facts, peers.tolist(), strict=True):
            fact["response"] = scored_text(batch, peer, context) if peer >= 0 else ""
        has = np.array([any(fact.values()) for fact in facts], dtype=bool)
        prompts = [
            _prompt(batch, row, written, fact, node, context) if known else batch["prompt_tokens"][row]
            for row, (fact, known) in enumerate(zip(facts, has, strict=True))
        ]
        too_long = has & (np.array([len(prompt) for prompt in prompts], dtype=np.int64) > node.max_prompt_tokens)
        is_told = has & ~too_long
        prompts = [batch["prompt_tokens"][row] if too_long[row] else prompt for row, prompt in enumerate(prompts)]
        columns = {
            "teacher_prompt_tokens": Column.ragged(prompts, "int64"),
            "teacher_mask": Column(is_told.astype(np.float32)),
        }
        stats = {
            "tell/told_fraction": Stat.of(is_told),
            "tell/too_long_fraction": Stat.of(too_long),
            "tell/prompt_tokens": Stat.of(
                [len(prompt) for prompt, known in zip(prompts, is_told, strict=True) if known]
            ),
        }
        # Dispatch uses the lengths of the policy's prompts.
        yield Output((part.index,), batch.rows, columns, stats, uncounted=("teacher_prompt_tokens",))


def _template(source: str) -> Callable[..., str]:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string(source)

    def rendered(**texts: str) -> str:
        try:
            return template.render(**texts)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:  # an expression failed
            raise ValueError(f"`template` of op tell cannot be filled in: {error}") from error

    return rendered


def _facts(batch: Batch, row: int, node: TellNode, context: Context) -> dict[str, str]:
    feedback = json.loads(batch["reward_info"].string(row)).get(node.feedback) if node.feedback else None
    return {"demonstration": _demonstration(batch, row, node, context), "feedback": _text(feedback)}


def _demonstration(batch: Batch, row: int, node: TellNode, context: Context) -> str:
    source = node.demonstration
    if source is None:
        return ""
    if source == "demonstration":
        return response_text(batch[source][row], context)
    if not source.startswith(EXTRA_INFO):
        return batch[source].string(row)
    try:
        return _text(value_at({"extra_info": json.loads(batch["extra_info"].string(row))}, source))
    except ValueError as error:
        raise ValueError(f"sample {batch.rows[row]} has {error}; mend the data, or tell another column") from error


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def _peers(batch: Batch, least: float) -> np.ndarray:
    """For each row the next row of its group, cyclically, whose reward is at least `least`; -1 if no other row has it.
    int64 [rows].
    """
    rewards, groups = batch["reward"].values, batch["group_id"].values
    right = rewards >= least
    if "excluded" in batch:
        right &= batch["excluded"].values == 0
    peers = np.full(len(batch), -1, dtype=np.int64)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        able = rows[right[rows]]
        if not len(able):
            continue
        following = able[np.searchsorted(able, rows, side="right") % len(able)]
        peers[rows] = np.where(following == rows, -1, following)
    return peers


def _prompt(
    batch: Batch, row: int, written: Callable[..., str], facts: Mapping[str, str], node: TellNode, context: Context
) -> np.ndarray:
    tokenizer = context.resources.tokenizer
    chat: _Chat = json.loads(batch["messages"].string(row))
    last = next((place for place in reversed(range(len(chat))) if chat[place]["role"] == "user"), len(chat) - 1)
    text = written(prompt=chat[last]["content"], **facts)
    if _is_text(batch["prompt_tokens"][row], chat, context):
        whole = text if node.message == "user" else f"{text}\n\n{chat[0]['content']}"
        return np.array(begun_text(tokenizer, whole), dtype=np.int64)
    told_chat = _with_text(chat, text, last if node.message == "user" else None)
    tools = rollout_tools(context)
    shown = [tool.schema for tool in offered(tools, json.loads(batch["extra_info"].string(row))).values()]
    # The template has already written the special tokens.
    rendered = chat_text(tokenizer, told_chat, shown)
    return np.array(tokenizer.encode(rendered, add_special_tokens=False), dtype=np.int64)


def _is_text(tokens: np.ndarray, chat: _Chat, context: Context) -> bool:
    """Whether the prompt is plain text without a template, not a chat of one message."""
    tokenizer = context.resources.tokenizer
    if not tokenizer.chat_template:
        return True
    if len(chat) > 1 or chat[0]["role"] != "user":
        return False
    plain = begun_text(tokenizer, chat[0]["content"])
    # A prompt that was cut still ends with the text.
    return plain[len(plain) - len(tokens) :] == tokens.tolist()


def _with_text(chat: _Chat, text: str, place: int | None) -> _Chat:
    """The chat with `text` in place of a message's text, or in its system message."""
    if place is not None:
        return [*chat[:place], {**chat[place], "content": text}, *chat[place + 1 :]]
    if chat[0]["role"] in ("system", "developer"):
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{text}"}, *chat[1:]]
    return [{"role": "system", "content": text}, *chat]
