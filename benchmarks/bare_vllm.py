"""vLLM alone, as a user of its engine would call it: what dagrl's rollouts are measured against.

vLLM has its own environment (docs/vllm.md), so it runs in a process of that environment's Python: this file, as a
program. Its arguments are those that dagrl gives its own servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from pipelines import Load


class BareVllm:
    """One vLLM engine, in a process of the environment ``vllm``."""

    def __init__(self, model: Path, server: dict[str, Any]) -> None:
        from dagrl.backends.backend import RankContext
        from dagrl.backends.environments import made_environments, python_in
        from dagrl.backends.serving.share import ServerShare
        from dagrl.backends.vllm.engine import engine_arguments
        from dagrl.backends.vllm.section import VllmEngineSpec

        spec = VllmEngineSpec(backend="vllm", group="bare", server=server)
        ranks, gpus = RankContext(0, 1, "127.0.0.1", 0, 60.0, 0), ("0",) if _has_gpu() else ()
        share = ServerShare("bare/0", 0, 0, 1, gpus, ranks, Path("logs"), 60.0, sleeps=False)
        arguments = engine_arguments(spec, share, model)
        own = ("worker_extension_cls", "stream_interval")
        arguments = {name: value for name, value in arguments.items() if name not in own}
        self._process = subprocess.Popen(
            [python_in(made_environments()["vllm"]), __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def generate(self, prompts: list[str], load: Load, *, logprobs: bool = True) -> float:
        """Seconds to answer these prompts, a token for each letter. Log-probs are part of what training needs."""
        assert self._process.stdin is not None
        wanted = {"n": load.n, "max_tokens": load.response_tokens, "logprobs": 0 if logprobs else None}
        self._process.stdin.write(json.dumps({"prompts": prompts, "wanted": wanted}) + "\n")
        self._process.stdin.flush()
        told = self._read()
        assert told["sampled"] == len(prompts) * load.n * load.response_tokens, told
        return float(told["seconds"])

    def close(self) -> None:
        """End it, and its processes with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30.0)
        self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the bare vLLM has ended; its last output is above")
        return json.loads(line)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _serve(arguments: dict[str, Any], answers: IO[str]) -> None:
    """Answer the requests on standard input, a line of JSON for each."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLM(**arguments)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **asked["wanted"],
        )
        prompts = [{"prompt_token_ids": list(text.encode())} for text in asked["prompts"]]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun
        sampled = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        print(json.dumps({"seconds": seconds, "sampled": sampled}), file=answers, flush=True)


if __name__ == "__main__":
    # vLLM's processes write to standard output, so the answers go to a copy of it.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _serve(json.loads(sys.argv[1]), answers)
