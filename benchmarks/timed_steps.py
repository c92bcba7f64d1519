"""What steps of timed engines would take if nothing but the engines took time, and where the rest has gone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dagrl_run import Event, of_step, span
from timed_engines import Timings

from dagrl.data.redistribute import shard_bounds


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step is made of."""

    generators: int
    trainers: int
    shards: int
    prompts: int
    n: int
    response_tokens: int

    @property
    def workers(self) -> int:
        """Ranks of engines; there is one worker of the host beside them."""
        return self.generators + self.trainers

    @property
    def samples(self) -> int:
        """Responses of a step."""
        return self.prompts * self.n

    def __post_init__(self) -> None:
        if self.prompts % self.generators:
            raise ValueError(f"{self.prompts} prompts are not the same number for each of {self.generators} servers")

    def timings(self, *, rollout_s: float, update_s: float, sync_s: float, portion: int) -> Timings:
        """Engines for it. Log-probs take half of the time in which shards come; `portion` in prompts."""
        return Timings(
            rollout_s=rollout_s,
            logprob_s=rollout_s / self.shards / 2,
            update_s=update_s,
            send_s=sync_s / 2,
            receive_s=sync_s / 2,
            responses=self.samples // self.generators,
            response_tokens=self.response_tokens,
            portion=portion * self.n,
        )

    def pipeline(self, prompt_file: str, steps: int) -> dict[str, Any]:
        """GRPO with a reference, trainer and generator on CPU slots of their own."""
        return {
            "name": "overhead",
            "model": {
                "init": {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
                | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
                | {"max_position_embeddings": 64 + self.response_tokens, "tie_word_embeddings": False},
                "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
            },
            "data": {"train": prompt_file, "prompts_per_step": self.prompts, "max_prompt_tokens": 64},
            "groups": {"train": {"cpus_per_node": self.trainers}, "rollout": {"cpus_per_node": self.generators}},
            "engines": {
                "actor": {"backend": "megatron", "group": "train", "optimizer": {"lr": 1e-6}},
                "reference": {"backend": "megatron", "frozen_copy_of": "actor"},
                "generator": {"backend": "hf", "group": "rollout", "weights_from": "actor"},
            },
            "nodes": {
                "rollout": {
                    "op": "rollout",
                    "engine": "generator",
                    "n": self.n,
                    "sampling": {"max_new_tokens": self.response_tokens},
                },
                "reward": {"op": "timed_engines:score"},
                "ref": {"op": "logprob", "engine": "reference", "write": "ref_logprob"},
                "advantage": {"op": "advantage", "estimator": "grpo"},
                "update": {"op": "update", "engine": "actor", "loss": {"kl_coef": 0.01}},
            },
            "schedule": {"shards_per_step": self.shards},
            "run": {"steps": steps, "start_timeout_s": 1800.0},
            "track": ["console", "tensorboard"],
        }


def critical_s(shape: Shape, timings: Timings) -> float:
    """Seconds of a step in which nothing but engines takes time.

    Weights are sent, then received; the servers sample, each its prompts one after the other; the reference takes a
    shard when it is there and the one before is done; the update takes all. Portions are dealt in turn, and what does
    no engine's work takes no time.
    """
    portion = timings.portion // shape.n
    each = shape.prompts // shape.generators

    def comes(prompt: int) -> float:
        place = prompt // (portion * shape.generators) * portion + prompt % portion
        # The last round may have fewer portions than there are servers, or a smaller one.
        return timings.rollout_s * min(place + 1, each) / each

    bounds = shard_bounds(shape.prompts, shape.shards)
    done = 0.0
    for shard_comes in sorted(max(map(comes, range(*bound))) for bound in bounds if bound[0] < bound[1]):
        done = max(done, shard_comes) + timings.logprob_s
    return timings.send_s + timings.receive_s + done + timings.update_s


def overheads(events: Sequence[Event], shape: Shape, timings: Timings, steps: Sequence[int]) -> dict[str, float]:
    """Milliseconds beyond the critical path, medians over `steps`: ``step`` in all, and of each stretch of a step.

    A step lasts from the end of one update to the end of the next.
    """
    milestones = {step: _milestones(of_step(events, step)) for step in range(steps[0] - 1, steps[-1] + 1)}
    tail = critical_s(shape, timings) - timings.send_s - timings.receive_s - timings.rollout_s - timings.update_s
    stretches: dict[str, list[float]] = {"step": []}
    for step in steps:
        here = {"begin": milestones[step - 1]["update"], **milestones[step]}
        expected = {"sync": timings.send_s + timings.receive_s, "rollout": timings.rollout_s, "ref": tail}
        expected["update"] = timings.update_s
        for (before, start), (name, end) in pairwise(here.items()):
            label = f"{before} to {name}" if name.endswith("begins") else name.removesuffix(" is there")
            stretches.setdefault(label, []).append(1000 * (end - start - expected.get(name, 0.0)))
        stretches["step"].append(1000 * (here["update"] - here["begin"] - critical_s(shape, timings)))
    return {name: statistics.median(values) for name, values in stretches.items()}


def _milestones(events: Sequence[Event]) -> dict[str, float]:
    """When what a step waits for has come, in its order, seconds since the epoch."""
    spans = {name: span(events, name) for name in ("sync", "rollout", "ref", "advantage", "update")}
    missing = [name for name, found in spans.items() if found is None]
    assert not missing, f"the timeline tells nothing of {', '.join(missing)}"
    found = {}
    for name, began_and_ended in spans.items():
        assert began_and_ended is not None
        begins, ends = began_and_ended
        if name in ("sync", "rollout", "update"):
            found[f"{name} begins"] = begins
        found[name] = ends
    return found
