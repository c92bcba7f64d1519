"""SGLang alone, as a user of its engine would call it: what dagrl's rollouts are measured against.

Its arguments are those that dagrl gives its own servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from pipelines import Load

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.share import ServerShare
from dagrl.backends.sglang.args import server_arguments
from dagrl.backends.sglang.layout import FUSED, KEPT_BACK
from dagrl.backends.sglang.section import SglangEngineSpec


class BareServer:
    """One SGLang engine; its schedulers are processes of their own, so scripts that make one guard ``__main__``."""

    def __init__(self, model: Path, server: dict[str, Any], **more: Any) -> None:
        """Start it with the fields that dagrl has for servers, and `more` of SGLang's."""
        import sglang

        # As dagrl's servers: not for all lengths at once.
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
        spec = SglangEngineSpec(backend="sglang", group="bare", server=server)
        # The context that SGLang gives the model by itself.
        positions = json.loads((model / "config.json").read_text())["max_position_embeddings"] - KEPT_BACK
        arguments = server_arguments(spec, whole_share(), model, positions=positions)
        if arguments.get("sampling_backend") == FUSED:
            del arguments["sampling_backend"]
        self._engine = sglang.Engine(**(arguments | more))

    def generate(self, prompts: list[str], load: Load, *, logprobs: bool = True) -> float:
        """Seconds to answer these prompts, a token for each letter. Log-probs are part of what training needs."""
        begun = time.perf_counter()
        answers = self._engine.generate(**_requests(prompts, load), return_logprob=logprobs)
        seconds = time.perf_counter() - begun
        sampled = sum(len(answer["output_ids"]) for answer in answers)
        assert sampled == len(prompts) * load.n * load.response_tokens, sampled
        return seconds

    def profile(self, prompts: list[str], load: Load, folder: Path, *, after_s: float, steps: int) -> None:
        """Answer these prompts, and write a Chrome trace of `steps` forward passes, `after_s` after the start."""

        async def both() -> None:
            generating = asyncio.ensure_future(
                self._engine.async_generate(**_requests(prompts, load), return_logprob=True)
            )
            await asyncio.sleep(after_s)
            await self._engine.tokenizer_manager.start_profile(
                ProfileReq(
                    output_dir=str(folder),
                    num_steps=steps,
                    activities=["GPU" if torch.cuda.is_available() else "CPU"],
                    with_stack=False,
                    record_shapes=False,
                )
            )
            if generating.done():
                raise RuntimeError("all responses had ended before the profile; give more --response-tokens")
            await generating

        from sglang.srt.managers.io_struct import ProfileReq

        self._engine.loop.run_until_complete(both())

    def close(self) -> None:
        """End its processes, and with them all others that this process has started: SGLang's way."""
        self._engine.shutdown()


def _requests(prompts: list[str], load: Load) -> dict[str, Any]:
    sampling = {"n": load.n, "temperature": 1.0, "max_new_tokens": load.response_tokens, "ignore_eos": True}
    return {"input_ids": [list(prompt.encode()) for prompt in prompts], "sampling_params": sampling}


def whole_share() -> ServerShare:
    """All of a server, on the first of the visible GPUs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ServerShare(
        name="bare/0",
        server=0,
        node=0,
        nodes=1,
        gpus=("0",) if torch.cuda.is_available() else (),
        ranks=RankContext(0, 1, "127.0.0.1", port, 60.0, 0),
        logs=Path(),
        start_timeout_s=0.0,
        sleeps=False,
    )
