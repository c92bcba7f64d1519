"""Trinity-RFT's data, generator and run."""

from __future__ import annotations

import math

from dagrl.importing import engines, parts
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import (
    EVAL_SAMPLING,
    MODEL,
    TASKS,
    eval_sets,
    has_own_responses,
    interval_of,
    type_default,
)

_CONVERT = "convert it once (docs/data.md)"


@joint("model.max_prompt_tokens model.max_response_tokens model.max_model_len", always=True)
def lengths(t: Translation) -> None:
    prompt, response, whole = (
        f"model.{name}" for name in ("max_prompt_tokens", "max_response_tokens", "max_model_len")
    )
    longest, bound = "nodes.rollout.sampling.max_new_tokens", "data.max_prompt_tokens"
    if t.number(response):
        t.copy(response, longest)
    elif t.number(whole) and t.number(prompt):
        t.write(longest, t.get(whole) - t.get(prompt), whole, note="less the prompt")
    if t.number(prompt):
        t.copy(prompt, bound)
    elif t.number(whole) and t.number(response):
        t.write(bound, t.get(whole) - t.get(response), whole, note="less the response")
    elif t.given(whole) and not t.number(response):
        t.note(whole, bound, "prompt and response share it; choose both lengths")


def _file(t: Translation, section: str) -> object:
    """The parquet file of a data set that Trinity loads by name and split; an unknown path is kept."""
    path, split = t.get(f"{section}.path"), t.get(f"{section}.split")
    if isinstance(path, Unresolved):
        return path
    if parts.DATA_ENDING.search(str(path)):
        return parts.parquet_file(path)
    return f"data/{str(path).rstrip('/').rpartition('/')[2].lower()}/{split or 'train'}.parquet"


@joint(
    under(
        TASKS,
        "taskset.path taskset.split taskset.name taskset.subset_name taskset.storage_type taskset.format.* "
        "taskset.data_selector.* taskset.task_selector.* tasksets.0.* tasksets.*.path tasksets.*.split "
        "eval_tasksets.*.path eval_tasksets.*.split eval_tasksets.*.name",
    ),
    always=True,
)
def data(t: Translation) -> None:
    prefix = f"{TASKS}.taskset" if t.given(f"{TASKS}.taskset.path") else f"{TASKS}.tasksets.0"
    sets = [prefix] if t.given(f"{prefix}.path") else []
    while prefix.endswith(".tasksets.0") and t.given(f"{TASKS}.tasksets.{len(sets)}.path"):
        sets.append(f"{TASKS}.tasksets.{len(sets)}")
    if sets:
        keys = tuple(key for one in sets for key in (f"{one}.path", f"{one}.split") if t.given(key))
        paths = [_file(t, one) for one in sets]
        known = len(paths) > 1 and not any(isinstance(path, Unresolved) for path in paths)
        t.write("data.train", paths if known else paths[0], *keys, note=_CONVERT)
    for index, (one, label) in enumerate(eval_sets(t)):
        target = f"data.val.{label}.path" if has_own_responses(t, index) else f"data.val.{label}"
        keys = tuple(f"{one}.{name}" for name in ("path", "split", "name") if t.given(f"{one}.{name}"))
        t.write(target, _file(t, one), *keys, note=_CONVERT)
    for name in ("name", "subset_name", "storage_type", "format.prompt_key", "format.response_key"):
        t.imply("columns are `prompt` and `reward_model.ground_truth` of the converted file", f"{prefix}.{name}")
    t.refuse("is a message of the prompt: write it into the file", f"{prefix}.format.system_prompt")
    _selector(t, prefix)


def _selector(t: Translation, prefix: str) -> None:
    section = next((key for key in ("data_selector", "task_selector") if t.below(f"{prefix}.{key}")), "data_selector")
    key, feature = (f"{prefix}.{section}.{name}" for name in ("selector_type", "feature_keys"))
    features = t.get(feature)
    match t.get(key):
        case "random" | "shuffle":
            t.write("data.order", "shuffled", key)
        case "sequential":
            t.write("data.order", "file", key)
        case "offline_easy2hard" if isinstance(features, list) and features:
            note = "the first of the features" if len(features) > 1 else ""
            t.write("data.order.by", features[0], key, feature, note=note)
        case "difficulty_based":
            t.write("data.order.adaptive.band", [0.2, 0.8], key, note="by measured pass rates")
        case None:
            t.write("data.order", "file", key, note="sequential by default there")
        case _:
            t.refuse("write your own sampler: `data.order: module:Class` (docs/curriculum.md)", key)


@joint(
    "buffer.batch_size synchronizer.sync_interval buffer.train_batch_size algorithm.repeat_times",
    always=True,
)
def batches(t: Translation) -> None:
    """``batch_size`` tasks make one optimizer step; a step here covers all of them between two syncs."""
    batch, interval, trained = "buffer.batch_size", "synchronizer.sync_interval", "buffer.train_batch_size"
    n, syncs = t.number("algorithm.repeat_times") or type_default(t, 3), interval_of(t)
    samples = t.number(trained, 0)
    prompts, key = t.number(batch, 1), batch
    if samples and samples % n == 0 and not t.given(batch):
        # The file of a trainer alone: `batch_size` is in its explorer's.
        prompts, key = samples // n, trained
    t.write("nodes.update.mini_batch", prompts, key)
    note = f"{prompts} x {syncs} optimizer steps between two syncs"
    t.write("data.prompts_per_step", prompts * syncs, key, *((interval,) if t.given(interval) else ()), note=note)
    t.write("nodes.rollout.n", n, "algorithm.repeat_times")
    if not samples or t.get(trained) == prompts * n:
        t.imply("is `batch_size` times `repeat_times`", trained)
    elif samples > prompts * syncs * n:
        reason = "counts the requests of workflows with several steps; a mini-batch has `batch_size` prompts"
        t.refuse(reason, trained)
    elif samples % n == 0:
        t.write("nodes.update.mini_batch", samples // n, trained, note=f"{samples} samples / {n}")
    else:
        t.refuse("a mini-batch has whole groups", trained)


_SAMPLING = ("temperature", "top_p", "top_k")


@joint(
    under(f"{TASKS}.taskset.rollout_args", "temperature top_p top_k"),
    under(f"{TASKS}.eval_tasksets", "*.rollout_args.* *.repeat_times"),
    under("model", "temperature top_p top_k"),
    under(MODEL, "temperature top_p top_k"),
    always=True,
)
def rollout_sampling(t: Translation) -> None:
    """A task set's own sampling takes precedence. A validation set without sampling has the first one's."""
    parts.put_node(t, "rollout", "rollout", "generator")
    for name in _SAMPLING:
        keys = [f"{section}.{name}" for section in (f"{TASKS}.taskset.rollout_args", "model", MODEL)]
        if key := next((key for key in keys if t.get(key) is not None), None):
            t.copy(key, f"nodes.rollout.sampling.{name}")
    for index, (one, label) in enumerate(eval_sets(t)):
        if has_own_responses(t, index):
            _val_responses(t, one, f"data.val.{label}.sampling", f"data.val.{label}.n")
        elif index == 0:
            _val_responses(t, one, "nodes.rollout.val_sampling", "nodes.rollout.val_n")


def _val_responses(t: Translation, one: str, sampling: str, number: str) -> None:
    """Write the sampling and the number of a validation set's responses. Missing sampling is the rollout's."""
    for name, target in EVAL_SAMPLING.items():
        sampled = t.tree.get(f"nodes.rollout.sampling.{target}")
        t.copy(f"{one}.rollout_args.{name}", f"{sampling}.{target}")
        if f"{sampling}.{target}" not in t.tree and not t.given(f"{one}.rollout_args.{name}") and sampled is not None:
            t.put(f"{sampling}.{target}", sampled)
    key = f"{one}.repeat_times"
    if t.number(key, 1) > 1 or sampling.startswith("data."):
        t.write(number, t.number(key, 1), key)
    others = (key for key in t.rest() if key.startswith(f"{one}.rollout_args.") and t.get(key) is not None)
    t.refuse("has no counterpart in `sampling`", *others)


@joint(
    under(
        MODEL,
        "engine_type tensor_parallel_size gpu_memory_utilization enforce_eager enable_prefix_caching "
        "enable_chunked_prefill data_parallel_size enable_expert_parallel extra_engine_args.*",
    ),
    always=True,
)
def server_options(t: Translation) -> None:
    backend, server = "sglang" if "sglang" in str(t.get(f"{MODEL}.engine_type")) else "vllm", "engines.generator.server"
    engines.put_generator(t, backend)
    t.write("engines.generator.backend", backend, f"{MODEL}.engine_type")
    t.copy(f"{MODEL}.tensor_parallel_size", engines.server_key(t, "tensor_parallel"), above=1)
    t.copy(f"{MODEL}.gpu_memory_utilization", engines.server_key(t, "memory"))
    t.copy(f"{MODEL}.enforce_eager", engines.server_key(t, "eager"))
    caching = f"{MODEL}.enable_prefix_caching"
    if backend == "vllm":
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "data_parallel_size", "enable_expert_parallel"):
            t.copy(f"{MODEL}.{name}", f"{server}.{name}")
    elif t.given(caching):
        t.write(f"{server}.disable_radix_cache", not t.get(caching), caching)
    extra = f"{MODEL}.extra_engine_args."
    for key in t.current:
        if key.startswith(extra):
            engines.library_field(t, key, "generator", "server", key.removeprefix(extra))


@joint("explorer.over_rollout.*")
def over_rollout(t: Translation) -> None:
    key = "explorer.over_rollout.ratio"
    ratio, prompts = t.number(key, 0), t.tree["data.prompts_per_step"]
    if ratio:
        t.write("nodes.rollout.over_sampling_batch_size", prompts, key, note="all of the batch")
        waited = max(1, math.floor(prompts * (1 - ratio)))
        t.write("data.prompts_per_step", waited, key, note="those that are waited for")
    t.refuse("the first complete prompts make the step", *t.rest())


@joint("mode")
def _mode(t: Translation) -> None:
    if t.get("mode") in ("both", "colocate"):
        t.imply("`dagrl run` is both", "mode")
    elif t.get("mode") == "bench" and parts.has_val_data(t):
        t.write("run.val_only", True, "mode", note="only the newest checkpoint")
    else:
        t.refuse("is `dagrl run --only NODES`, with the nodes of one of the two (docs/explore_train.md)", "mode")


@joint("buffer.total_steps buffer.total_epochs trainer.total_steps", always=True)
def _steps(t: Translation) -> None:
    syncs = interval_of(t)
    for key in ("buffer.total_steps", "trainer.total_steps"):
        steps = t.get(key)
        if t.number(key) or isinstance(steps, Unresolved):
            note = f"/ sync_interval {syncs}" if syncs > 1 else ""
            t.write("run.steps", steps if isinstance(steps, Unresolved) else max(1, steps // syncs), key, note=note)
            return
    parts.write_epochs(t, "buffer.total_epochs")


@joint("trainer.save_interval explorer.eval_interval", always=True)
def _every(t: Translation) -> None:
    syncs, save, interval = interval_of(t), "trainer.save_interval", "explorer.eval_interval"
    note = f"/ sync_interval {syncs}" if syncs > 1 else ""
    if t.number(save, 0):
        t.write("run.save_every", max(1, t.get(save) // syncs), save, note=note)
    if parts.has_val_data(t):
        t.write("run.validate_every", max(1, t.number(interval, 100) // syncs), interval, note=note)


@joint("explorer.eval_on_startup", always=True)
def _first(t: Translation) -> None:
    if parts.has_val_data(t):
        t.copy("explorer.eval_on_startup", "run.validate_first")


RUN = (
    parts.named("name"),
    _mode,
    _steps,
    _every,
    _first,
    parts.kept("trainer.max_checkpoints_to_keep"),
    parts.tracked("monitor.monitor_type", project="project", group="group"),
)


_BUFFER = "buffer.trainer_input.experience_buffer"


@joint(f"{_BUFFER}.replay_buffer.*")
def replay(t: Translation) -> None:
    prefix = f"{_BUFFER}.replay_buffer"
    if not t.flag(f"{prefix}.enable"):
        return
    t.put("nodes.replay.op", "buffer")
    note = "as many groups again as a step has: there, however many are ready sooner than new ones"
    t.write("nodes.replay.groups_per_step", t.tree.get("data.prompts_per_step", 1), f"{prefix}.enable", note=note)
    note = "those that have returned least: there, newer ones first"
    t.write("nodes.replay.policy", "fifo", f"{prefix}.priority_fn", note=note)
    bounds = t.below(f"{prefix}.priority_fn_args")
    t.refuse("`max_age` and `max_uses` of the buffer bound what returns", *bounds)
    t.imply("a group returns in later steps alone", f"{prefix}.reuse_cooldown_time")
