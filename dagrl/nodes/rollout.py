"""``rollout``: samples a response to each prompt; finished shards stream out while the others are still sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dagrl.data.batch import Column
from dagrl.data.stats import Stat
from dagrl.engines.base import Completion, GenerateEngine, GenerationRequest
from dagrl.nodes.base import Context, Output, Part


def rollout(parts: Sequence[Part], context: Context) -> Iterator[Output]:
    """Yield each shard's responses once all of them are there."""
    engine: GenerateEngine = context.engine
    requests = [
        GenerationRequest(part.batch["prompt_tokens"][place], sample_seed(context, int(row)))
        for part in parts
        for place, row in enumerate(part.batch.rows)
    ]
    owners = [(position, row) for position, part in enumerate(parts) for row in range(len(part.batch))]
    finished: list[dict[int, Completion]] = [{} for _ in parts]
    for part in parts:
        if len(part.batch) == 0:
            yield _output(part, {}, engine.policy_version)
    for completion in engine.generate(requests, context.sampling):
        position, row = owners[completion.index]
        finished[position][row] = completion
        if len(finished[position]) == len(parts[position].batch):
            yield _output(parts[position], finished[position], engine.policy_version)


def sample_seed(context: Context, row: int) -> int:
    """Seed of one sample: from the run's seed, the step and the row alone, so that a resumed run draws the same."""
    # A seed may be negative, numpy's sources of randomness take none such.
    entropy = [context.pipeline.run.seed % 2**64, context.step, int(context.validation), row]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


def _output(part: Part, completions: dict[int, Completion], version: int) -> Output:
    ordered = [completions[row] for row in range(len(part.batch))]
    tokens = Column.ragged([completion.tokens for completion in ordered], "int64")
    columns = {
        "response_tokens": tokens,
        "response_mask": Column(np.ones(len(tokens.values), dtype=np.float32), tokens.offsets),
        "rollout_logprob": Column.ragged([completion.logprobs for completion in ordered], "float32"),
        "policy_version": Column(np.full(len(ordered), version, dtype=np.int64)),
    }
    stats = {
        "response_tokens": Stat.of(tokens.lengths),
        "response_tokens/cut_fraction": Stat.of([each.finish_reason == "length" for each in ordered]),
    }
    return Output((part.index,), part.batch.rows, columns, stats)
