"""``samples``, the implicit sink: writes ``samples/step_N.parquet`` with the policy's responses as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dagrl.algorithms.at_k import figures_at_k
from dagrl.config.columns import LOGPROB_COLUMNS
from dagrl.config.schema.val_metrics import Vote, vote_of
from dagrl.data.batch import Batch, view_of
from dagrl.data.stats import Stat
from dagrl.data.tables import write_tables
from dagrl.model_files.images import shortened
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import passages, response_text
from dagrl.ops.reward import scored_text
from dagrl.ops.trajectories import first_rows, group_outcomes, is_fresh, own_rows, was_lost
from dagrl.ops.turns.settings import policy_images
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function, located, name_of
from dagrl.rewards.exact import compared
from dagrl.rewards.final_answer import final_answer

_UNCHANGED = ("policy_version", "token_version", "finish_reason")
"""Columns that are written unchanged."""


def samples(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Write the first rows of the step's batch, or of each validation set, as text.

    Yields the batch's ids and the metrics of rewards and lengths.
    """
    (part,) = parts
    batch = part.batch
    limit = context.pipeline.run.samples_per_step
    if limit:
        name = f"step_{context.step}{'_val' if context.validation else ''}.parquet"
        table = _table(_used_rows(_first_of_each_set(batch, limit), context), context)
        write_tables([table], context.resources.run_dir / "samples" / name)
    # Samples of earlier steps do not measure the policy.
    samples = first_rows(batch.take(np.flatnonzero(is_fresh(batch))) if "is_replayed" in batch else batch, context)
    # A validation counts a failed program as a sample without a right answer, and leaves out what machines have lost.
    counted = samples if context.validation else own_rows(samples)
    outcomes = None if context.validation else group_outcomes(counted, context.pipeline.data)
    stats = _stats(counted, context) | _stats_of_sources(counted, context)
    yield Output((), batch.rows, stats=stats, outcomes=outcomes)


def _stats(batch: Batch, context: Context) -> dict[str, Stat]:
    """Metrics of the policy's samples, or of the data set's responses if nothing is sampled."""
    if "response_tokens" not in batch:
        return {"demonstration_tokens": Stat.of(batch["demonstration"].lengths)} if "demonstration" in batch else {}
    # The reward is reported here, because several ops may contribute to it, and not in `rollout`, which may finish
    # more prompts than the step takes.
    whole, batch = batch, batch.take(np.flatnonzero(~was_lost(batch))) if context.validation else batch
    stats = {"reward": Stat.of(batch["reward"].values)} if "reward" in batch else {}
    stats["response_tokens"] = Stat.of(batch["response_tokens"].lengths)
    if "finish_reason" in batch:
        cut = np.array([reason == "length" for reason in batch["finish_reason"].strings()], bool)
        stats["response_tokens/cut_fraction"] = Stat.of(cut)
        if cut.any() and "reward" in batch:
            stats["reward/cut_mean"] = Stat.of(batch["reward"].values[cut])
    if context.validation:
        return stats | validation_stats(whole, context)
    stats["prompt_tokens"] = Stat.of(batch["prompt_tokens"].lengths)
    return stats


def _stats_of_sources(batch: Batch, context: Context) -> dict[str, Stat]:
    prefixes = {} if context.validation else context.pipeline.data.train_prefixes
    names = np.array(batch["data_set"].strings() if prefixes else [])
    stats: dict[str, Stat] = {}
    for name, prefix in prefixes.items():
        rows = batch.take(np.flatnonzero(names == name))
        if len(rows):
            stats |= {prefix + metric: stat for metric, stat in _stats(rows, context).items()}
            if "reward" in rows:
                right = rows["reward"].values >= context.pipeline.data.val_pass_reward
                stats[f"{prefix}pass_rate"] = Stat.of(right)
    return stats


def _first_of_each_set(batch: Batch, limit: int) -> Batch:
    seen: Counter[str] = Counter()
    chosen = []
    for row, name in enumerate(batch["data_set"].strings()):
        seen[name] += 1
        if seen[name] <= limit:
            chosen.append(row)
    return batch.take(np.array(chosen))


def _used_rows(batch: Batch, context: Context) -> Batch:
    """Drop the unused rows of trajectories."""
    if "trajectory_share" not in batch:
        return batch
    first = batch.rows % context.sequences == 0
    return batch.take(np.flatnonzero(first | (batch["trajectory_share"].values > 0)))


def _table(batch: Batch, context: Context) -> pa.Table:
    decode, rows = context.resources.tokenizer.decode, range(len(batch))
    # Prompts are shown with one token for each image.
    settings = context.resources.once("image settings", lambda: policy_images(context))
    prompts = [batch["prompt_tokens"][row] for row in rows]
    table: dict[str, list] = {
        "sample_id": batch.rows.tolist(),
        "group_id": batch["group_id"].values.tolist(),
        "data_set": batch["data_set"].strings(),
        "data_source": batch["data_source"].strings(),
        "prompt": [decode(prompt if settings is None else shortened(prompt, settings)) for prompt in prompts],
        "answer": batch["answer"].strings(),
    }
    if "image_names" in batch:
        table["images"] = [json.loads(names) for names in batch["image_names"].strings()]
        table["thumbnails"] = [json.loads(text) for text in batch["image_thumbnails"].strings()]
    if "demonstration" in batch:
        table["demonstration"] = [decode(batch["demonstration"][row]) for row in rows]
    if "response_tokens" in batch:
        table["response"] = [decode(batch["response_tokens"][row]) for row in rows]
        if "reward" in batch:
            table["reward"] = batch["reward"].values.tolist()
        table["response_tokens"] = [batch["response_tokens"][row].tolist() for row in rows]
    if "reward_info" in batch:
        further = [json.loads(text) for text in batch["reward_info"].strings()]
        # Text columns are excluded: a column has one type in the files of all steps.
        further = [{name: value for name, value in info.items() if not isinstance(value, str)} for info in further]
        names = dict.fromkeys(name for numbers in further for name in numbers)
        table |= {f"reward_info/{name}": [numbers.get(name) for numbers in further] for name in names}
    for name in ("is_expert", "is_replayed"):
        if name in batch:
            table[name] = (batch[name].values > 0).tolist()
    if "advantage" in batch:
        means = [batch["advantage"][row] for row in rows]
        table["advantage"] = [float(values.mean()) if len(values) else 0.0 for values in means]
    table |= view_of(batch.select(name for name in _UNCHANGED if name in batch))
    if "agent_output" in batch:
        # Rows of a trajectory have the id of its first row.
        table["trajectory"] = (batch.rows - batch.rows % context.sequences).tolist()
        table["excluded"] = (batch["excluded"].values > 0).tolist()
        table["output"] = batch["agent_output"].strings()
    if "token_turn" in batch:
        table["turns"] = [_turns(batch, row, context) for row in rows]
    if logprobs := [name for name in LOGPROB_COLUMNS if name in batch]:
        table |= view_of(batch.select(name for name in (*logprobs, "token_turn") if name in batch))
        table["token_text"] = _token_texts(batch, context)
    return pa.table({name: pa.array(values, _type_of(name)) for name, values in table.items()})


def _type_of(name: str) -> pa.DataType | None:
    """The type of a column whose values may all be empty or missing; None if it follows from the values.

    The files of all steps have the same types, so that they can be read together.
    """
    match name:
        case "images" | "thumbnails" | "token_text":
            return pa.list_(pa.string())
        case "response_tokens":
            return pa.list_(pa.int64())
        case "turns":
            return pa.list_(pa.struct({"turn": pa.int64(), "text": pa.string(), "reward": pa.float64()}))
    return pa.float64() if name.startswith("reward_info/") else None


def _token_texts(batch: Batch, context: Context) -> list[list[str]]:
    """The text of each response token. A token that holds a part of a character has the replacement character."""
    tokens = batch["response_tokens"]
    vocabulary, places = np.unique(tokens.values, return_inverse=True)
    texts = [context.resources.tokenizer.decode([token]) for token in vocabulary.tolist()]
    ends = np.cumsum(tokens.lengths).tolist()
    return [[texts[place] for place in places[begin:end]] for begin, end in pairwise([0, *ends])]


def _turns(batch: Batch, row: int, context: Context) -> list[dict[str, Any]]:
    """A response as a list of passages; observations have neither number nor reward."""
    return [
        {
            "turn": passage.turn or None,
            "text": response_text(passage.tokens, context),
            "reward": passage.reward if passage.turn and "token_reward" in batch else None,
        }
        for passage in passages(batch, row)
    ]


def validation_stats(batch: Batch, context: Context) -> dict[str, Stat]:
    """Statistics over the prompts of a validation, without the prefix ``val/``.

    `batch` holds the rows of each prompt consecutively. Raises ValueError if the user's ``val_vote`` fails.
    """
    sets = np.array(batch["data_set"].strings())
    stats: dict[str, Stat] = {}
    for name, prefix in context.pipeline.data.val_prefixes.items():
        rows = np.flatnonzero(sets == name)
        if prefix:
            stats[f"{prefix}response_tokens"] = Stat.of(batch["response_tokens"].lengths[rows])
        stats |= _stats_of_set(batch.take(rows), context.pipeline.val_ns[name], prefix, context)
    return stats


def _stats_of_set(batch: Batch, n: int, prefix: str, context: Context) -> dict[str, Stat]:
    rewards = batch["reward"].values.reshape(-1, n)
    measured = ~was_lost(batch).reshape(-1, n)
    votes = _votes(batch, n, context) if n > 1 else None
    sources = np.array(batch["data_source"].strings())[::n]
    sets = {prefix: np.arange(len(sources))}
    several = list(dict.fromkeys(sources.tolist()))
    if len(several) > 1:
        sets |= {f"{prefix}{source}/": np.flatnonzero(sources == source) for source in several}
    stats: dict[str, Stat] = {}
    for place, prompts in sets.items():
        chosen = [votes[prompt] for prompt in prompts.tolist()] if votes is not None else None
        figures = figures_at_k(rewards[prompts], measured[prompts], chosen, context.pipeline.data.val_pass_reward)
        for metric, values in figures.items():
            stats[place + metric] = Stat.of(values[~np.isnan(values)])
    return stats


def _votes(batch: Batch, n: int, context: Context) -> list[list[str | None]] | None:
    vote = vote_of(context.pipeline)
    if vote is None:
        return None
    resources = context.resources
    answer_in = resources.once("val_vote", lambda: load_vote(vote, resources.folder))
    answers = [answer_in(scored_text(batch, row, context)) for row in range(len(batch))]
    return [answers[first : first + n] for first in range(0, len(answers), n)]


Answered = Callable[[str], str | None]
"""Extracts the answer of a response; None without an answer."""


def load_vote(vote: Vote, folder: Path | None = None) -> Answered:
    """The function of a `Vote`; user modules are also searched in `folder`. Raises ValueError for an unknown name.

    The returned function raises ValueError with its location if the user's function fails.
    """
    if vote.fn == "math":
        return partial(final_answer, strict=vote.args.get("strict", False))
    if vote.fn == "exact":
        return partial(compared, **vote.args)
    return partial(_called, load_function(vote.fn, folder))


def _called(function: Callable[[str], object], response: str) -> str | None:
    answer = call_or_stop(f"data.val_vote {name_of(function)}", function, {}, response)
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"data.val_vote {located(function)} returned {answer!r}; return a text or None")
    return answer
