"""Time the output layer with log-probs and gradients: whole logits, logits in chunks twice, logits in chunks once.

    python benchmarks/output_layer.py
    python benchmarks/output_layer.py --tokens 16384 --hidden 4096 --vocabulary 151936 --rounds 10
    python benchmarks/output_layer.py --tokens 1024 --hidden 512 --vocabulary 32768 --chunk-elements 4194304

Each way runs forward and backward in its process, in turns, with the same hidden states, weights and PPO loss. Prints
tokens a second of the fastest step, the most bytes allocated in a step besides its inputs (on a CPU, of the process's
resident memory), and by how much gradients differ from those of whole logits. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dagrl.algorithms.losses import PolicyTokens, ppo_clip
from dagrl.backends.megatron.engine.logprob import linear_loss, linear_token_logprobs, token_logprobs
from dagrl.backends.megatron.engine.token_statistics import CHUNK_ELEMENTS, TokenScores, VocabColumns

MIB = 2**20
AIM = 0.98
"""Tokens a second of chunks that are computed once, over those of whole logits."""
_WARMUP = 2


class Work:
    """A micro-batch: everything but the way to compute it."""

    def __init__(self, args: argparse.Namespace) -> None:
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        generator = torch.Generator(device).manual_seed(1)
        normal = partial(torch.randn, generator=generator, device=device)
        self.hidden = normal(args.tokens, args.hidden).to(dtype).requires_grad_()
        self.weight = (normal(args.vocabulary, args.hidden) / args.hidden**0.5).to(dtype)
        self.weight.requires_grad_(not args.frozen)
        self.targets = torch.randint(args.vocabulary, (args.tokens,), generator=generator, device=device)
        self.advantage = normal(args.tokens)
        self.old_logprob = normal(args.tokens) / 4 - torch.log(torch.tensor(args.vocabulary))
        self.how = {"temperature": 1.0, "vocab_size": args.vocabulary, "chunk_elements": args.chunk_elements}

    def loss(self, logprob: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """PPO's loss of some tokens; the parts add up to the mean."""
        tokens = PolicyTokens(logprob, self.old_logprob[part], self.advantage[part])
        return ppo_clip(tokens, clip_low=0.2, clip_high=0.2).loss.sum() / len(self.targets)


_work: Work
"""The micro-batch of a process that measures one way."""


def whole(work: Work) -> torch.Tensor:
    """Logits [tokens, vocabulary], kept for the backward pass."""
    return work.loss(
        token_logprobs(work.hidden @ work.weight.t(), work.targets, VocabColumns(len(work.weight), **work.how))[0]
    )


def recompute(work: Work) -> torch.Tensor:
    """Logits in chunks, and again in the backward pass."""
    return work.loss(
        linear_token_logprobs(work.hidden, work.weight, work.targets, VocabColumns(len(work.weight), **work.how))[0]
    )


def one_product(work: Work) -> torch.Tensor:
    """Logits in chunks, which their gradients overwrite."""

    def slopes_of(part: slice, scores: TokenScores) -> TokenScores:
        logprob = scores.logprob.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(work.loss(logprob, part), logprob)
        return TokenScores(slope)

    scores, carrier = linear_loss(
        work.hidden, work.weight, work.targets, VocabColumns(len(work.weight), **work.how), slopes_of
    )
    return work.loss(scores.logprob) + carrier


WAYS: dict[str, Callable[[Work], torch.Tensor]] = {
    "whole logits": whole,
    "chunks, twice": recompute,
    "chunks, once": one_product,
}


def main() -> None:
    """Measure each way, compare and print."""
    args = _arguments()
    context = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks = dict.fromkeys(WAYS, 0)
    with contextlib.ExitStack() as opened:
        pools = {name: opened.enter_context(context.Pool(1, _begin, (args,))) for name in WAYS}
        for number in range(_WARMUP + args.rounds):
            for name, pool in pools.items():
                second, peak = pool.apply(_step, (name,))
                if number >= _WARMUP:
                    seconds[name].append(second)
                    peaks[name] = max(peaks[name], peak)
        gradients = {name: pool.apply(_gradients) for name, pool in pools.items()}
    fastest = {name: min(each) for name, each in seconds.items()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    logits = args.tokens * args.vocabulary * (2 if torch.cuda.is_available() else 4)
    print(f"{device}: {args.tokens} tokens, hidden size {args.hidden}, {args.vocabulary} columns", end="")
    print(f"; logits are {logits / MIB:.0f} MiB")
    rows = {}
    for name in WAYS:
        differs = [_distance(*pair) for pair in zip(gradients[name], gradients["whole logits"], strict=True)]
        rate, speed, peak = args.tokens / fastest[name], fastest["whole logits"] / fastest[name], peaks[name]
        rows[name] = {"tokens_per_s": rate, "peak_bytes": peak, "of_whole": speed, "differs": differs}
        print(f"{name:14} {rate:10.0f} tokens/s ({speed:.3f} of whole), peak {peak / MIB:8.0f} MiB", end="")
        print(f", gradients differ by {max(differs):.1e}")
    print(f"chunks, once / whole: {rows['chunks, once']['of_whole']:.3f} (aim: {AIM})")
    line = json.dumps({"device": device, **{key: value for key, value in vars(args).items() if key != "json"}, **rows})
    print(line)
    if args.json is not None:
        args.json.write_text(line + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--chunk-elements", type=int, default=CHUNK_ELEMENTS, help="logits of a chunk")
    parser.add_argument("--frozen", action="store_true", help="the layer's weight has no gradient")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps, after two others")
    parser.add_argument("--json", type=Path, help="write the results here too")
    return parser.parse_args()


def _begin(args: argparse.Namespace) -> None:
    global _work
    _work = Work(args)


def _step(name: str) -> tuple[float, int]:
    """Seconds and peak bytes of a step."""
    _work.hidden.grad = _work.weight.grad = None
    before = _begin_peak()
    begun = time.perf_counter()
    WAYS[name](_work).backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun, _peak() - before


def _gradients() -> list[torch.Tensor]:
    return [torch.zeros(1) if each.grad is None else each.grad.cpu() for each in (_work.hidden, _work.weight)]


def _begin_peak() -> int:
    """Bytes that are held now; the peak counts from here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)  # What was freed would be used again without a trace.
    Path("/proc/self/clear_refs").write_text("5")  # See proc(5).
    return _resident("VmRSS")


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _resident("VmHWM")


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def _distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    return float((tensor.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))


if __name__ == "__main__":
    main()
