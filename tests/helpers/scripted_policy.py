"""Sessions whose policy is a script: what it samples is known, and who asked for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from chatml import chatml_tokenizer

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.ops.agents.context_writer import ContextWriter
from dagrl.ops.agents.session import Session
from dagrl.ops.agents.tree import TrajectoryTree
from dagrl.ops.turns.settings import hermes_calls

TOKENIZER = chatml_tokenizer()
WRITER = ContextWriter(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


class Policy:
    """Says what `says` gives for the text that it has seen; log-probs count up."""

    def __init__(self, says: Callable[[str], str] | list[str] = lambda seen: "fine") -> None:
        self.says = says
        self.asked: list[GenerationRequest] = []
        self.sampled: list[Completion] = []
        self.version = 3

    async def ask(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        seen = np.concatenate([request.prompt, request.begun])
        text = self.says.pop(0) if isinstance(self.says, list) else self.says(TOKENIZER.decode(seen))
        await asyncio.sleep(0)
        tokens = np.array([*WRITER.plain(text), END], dtype=np.int64)
        cut = request.limit is not None and len(tokens) > request.limit
        tokens = tokens[: request.limit]
        logprobs = -0.01 * (len(self.sampled) + np.arange(len(tokens), dtype=np.float32))
        reply = Completion(0, tokens, logprobs, "length" if cut else "stop", self.version)
        self.sampled.append(reply)
        return reply


def session_of(policy: Policy, *, longest: int = 100_000, max_turns: int = 10_000, prompt: Any = (1,)) -> Session:
    """A session of that policy; `longest` prompt and response, and the row's `prompt`."""
    tree = TrajectoryTree(np.array(prompt, dtype=np.int64), 7, longest, longest)
    return Session(tree, WRITER, lambda tools: hermes_calls, True, policy.ask, max_turns)
