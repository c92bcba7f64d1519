"""Trinity-RFT's ``buffer``: task sets, lengths and batches."""

from __future__ import annotations

import re
from typing import Any

from dagrl.importing.parts import data_file
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import TASKS, eval_sets, has_own_responses, interval_of, type_default


def _lengths(t: Translation) -> None:
    prompt, response, whole = (
        f"model.{name}" for name in ("max_prompt_tokens", "max_response_tokens", "max_model_len")
    )
    if t.number(response):
        t.write("nodes.rollout.sampling.max_new_tokens", t.get(response), response)
    if t.number(prompt):
        t.write("data.max_prompt_tokens", t.get(prompt), prompt)
        t.imply("follows from prompt and response", whole)
    elif t.number(whole) and t.number(response):
        t.write("data.max_prompt_tokens", t.get(whole) - t.get(response), whole, note="less the response")
    if t.given(whole) and not t.number(prompt) and not t.number(response):
        t.note(whole, "data.max_prompt_tokens", "prompt and response share it; choose both lengths")
    if not t.number(response) and t.number(whole) and t.number(prompt):
        rest = t.get(whole) - t.get(prompt)
        t.write("nodes.rollout.sampling.max_new_tokens", rest, whole, note="less the prompt")


def _file(path: Any, split: Any) -> Any:
    """The parquet file of a data set that Trinity loads by name and split; an unknown path stays as it is."""
    if isinstance(path, Unresolved):
        return path
    text = str(path)
    if re.search(r"\.(parquet|jsonl?|csv)$", text):
        return data_file(path)
    return f"data/{text.rstrip('/').rpartition('/')[2].lower()}/{split or 'train'}.parquet"


def _data(t: Translation) -> None:
    prefix = f"{TASKS}.taskset" if t.given(f"{TASKS}.taskset.path") else f"{TASKS}.tasksets.0"
    key, split = f"{prefix}.path", f"{prefix}.split"
    if t.given(key):
        keys = tuple(each for each in (key, split) if t.given(each))
        t.write("data.train", _file(t.get(key), t.get(split)), *keys, note="convert it once (docs/data.md)")
    for index, (one, label) in enumerate(eval_sets(t)):
        target = f"data.val.{label}.path" if has_own_responses(t, index) else f"data.val.{label}"
        file = _file(t.get(f"{one}.path"), t.get(f"{one}.split"))
        keys = tuple(f"{one}.{name}" for name in ("path", "split", "name") if t.given(f"{one}.{name}"))
        t.write(target, file, *keys, note="convert it once (docs/data.md)")
    for name in ("name", "subset_name", "storage_type", "format.prompt_key", "format.response_key"):
        t.imply("columns are `prompt` and `reward_model.ground_truth` of the converted file", f"{prefix}.{name}")
    t.refuse("is a message of the prompt: write it into the file", f"{prefix}.format.system_prompt")
    _selector(t, prefix)


def _selector(t: Translation, prefix: str) -> None:
    for name in ("data_selector", "task_selector"):
        key = f"{prefix}.{name}.selector_type"
        if not t.given(key):
            continue
        if t.get(key) in ("random", "sequential", "shuffle"):
            t.write("data.shuffle", t.get(key) != "sequential", key)
        else:
            t.refuse("prompts come in the file's order, or shuffled", key)
        return
    t.write("data.shuffle", False, f"{prefix}.data_selector.selector_type", note="sequential by default there")


def _batches(t: Translation) -> None:
    """``batch_size`` tasks make one optimizer step; a step here is all between two syncs."""
    batch, interval, trained = "buffer.batch_size", "synchronizer.sync_interval", "buffer.train_batch_size"
    n, syncs = t.number("algorithm.repeat_times") or type_default(t, 3), interval_of(t)
    samples = t.number(trained, 0)
    each, key = t.number(batch, 1), batch
    if samples and samples % n == 0 and not t.given(batch):
        # The file of a trainer alone: `batch_size` is in its explorer's.
        each, key = samples // n, trained
    t.write("nodes.update.mini_batch", each, key)
    note = f"{each} x {syncs} optimizer steps between two syncs"
    t.write("data.prompts_per_step", each * syncs, key, *((interval,) if t.given(interval) else ()), note=note)
    t.write("nodes.rollout.n", n, "algorithm.repeat_times")
    if samples and t.get(trained) != each * n:
        if samples > each * syncs * n:
            t.refuse(
                "counts the requests of workflows with several steps; a mini-batch has `batch_size` prompts", trained
            )
        elif t.get(trained) % n == 0:
            t.write("nodes.update.mini_batch", t.get(trained) // n, trained, note=f"{t.get(trained)} samples / {n}")
        else:
            t.refuse("a mini-batch has whole groups", trained)
    else:
        t.imply("is `batch_size` times `repeat_times`", trained)


RULES = (
    joint(_lengths, "model.max_prompt_tokens model.max_response_tokens model.max_model_len", always=True),
    joint(
        _data,
        under(
            TASKS,
            "taskset.path taskset.split taskset.name taskset.subset_name taskset.storage_type "
            "taskset.format.* taskset.data_selector.selector_type "
            "taskset.task_selector.selector_type tasksets.0.* eval_tasksets.*.path "
            "eval_tasksets.*.split eval_tasksets.*.name",
        ),
        always=True,
    ),
    joint(
        _batches,
        "buffer.batch_size synchronizer.sync_interval buffer.train_batch_size algorithm.repeat_times",
        always=True,
    ),
)
