"""Trinity-RFT's data, nodes and run."""

from __future__ import annotations

import math
from typing import Any

from dagrl.importing.engines import generator, library_field, server_key
from dagrl.importing.parts import (
    DAPO,
    DATA_ENDING,
    has_val_data,
    is_known,
    keep,
    kl_estimator,
    named,
    parquet_file,
    put_critic_nodes,
    put_logprob,
    put_node,
    put_reference,
    tracked,
    write_epochs,
)
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, under
from dagrl.importing.trinity.common import (
    EVAL_SAMPLING,
    MODEL,
    TASKS,
    TYPES,
    eval_sets,
    has_own_responses,
    interval_of,
    type_default,
    uses_critic,
)


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
    if DATA_ENDING.search(text):
        return parquet_file(path)
    return f"data/{text.rstrip('/').rpartition('/')[2].lower()}/{split or 'train'}.parquet"


def _data(t: Translation) -> None:
    prefix = f"{TASKS}.taskset" if t.given(f"{TASKS}.taskset.path") else f"{TASKS}.tasksets.0"
    if t.given(f"{prefix}.path"):
        sets = [prefix]
        while prefix.endswith(".tasksets.0") and t.given(f"{TASKS}.tasksets.{len(sets)}.path"):
            sets.append(f"{TASKS}.tasksets.{len(sets)}")
        keys = tuple(option for one in sets for option in (f"{one}.path", f"{one}.split") if t.given(option))
        paths = [_file(t.get(f"{one}.path"), t.get(f"{one}.split")) for one in sets]
        known = len(paths) > 1 and not any(isinstance(path, Unresolved) for path in paths)
        t.write("data.train", paths if known else paths[0], *keys, note="convert it once (docs/data.md)")
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
        feature = f"{prefix}.{name}.feature_keys"
        match t.get(key):
            case "random" | "shuffle":
                t.write("data.order", "shuffled", key)
            case "sequential":
                t.write("data.order", "file", key)
            case "offline_easy2hard" if isinstance(t.get(feature), list) and t.get(feature):
                note = "the first of the features" if len(t.get(feature)) > 1 else ""
                t.write("data.order.by", t.get(feature)[0], key, feature, note=note)
            case "difficulty_based":
                t.write("data.order.adaptive.band", [0.2, 0.8], key, note="by measured pass rates")
                t.imply("pass rates are those of the policy itself", feature)
            case _:
                t.refuse("write a sampler of your own: `data.order: module:Class` (docs/curriculum.md)", key)
        t.imply("belongs to the selector", *t.below(f"{prefix}.{name}"))
        return
    t.write("data.order", "file", f"{prefix}.data_selector.selector_type", note="sequential by default there")


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


DATA = (
    joint(_lengths, "model.max_prompt_tokens model.max_response_tokens model.max_model_len", always=True),
    joint(
        _data,
        under(
            TASKS,
            "taskset.path taskset.split taskset.name taskset.subset_name taskset.storage_type "
            "taskset.format.* taskset.data_selector.* taskset.task_selector.* tasksets.0.* tasksets.*.path "
            "tasksets.*.split eval_tasksets.*.path "
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


def _rollout(t: Translation) -> None:
    put_node(t, "rollout", "rollout", "generator")
    for name in ("temperature", "top_p", "top_k"):
        keys = [f"{TASKS}.taskset.rollout_args.{name}", f"model.{name}", f"{MODEL}.{name}"]
        key = next((option for option in keys if t.given(option) and t.get(option) is not None), None)
        if key:
            t.write(f"nodes.rollout.sampling.{name}", t.get(key), key)
            t.imply("the task set's takes its place", *(option for option in keys if option != key))
    for index, (one, label) in enumerate(eval_sets(t)):
        if has_own_responses(t, index):
            _val_responses(t, one, f"data.val.{label}.sampling", f"data.val.{label}.n")
        elif index == 0:
            _val_responses(t, one, "nodes.rollout.val_sampling", "nodes.rollout.val_n")
        given = (key for key in t.current if key.startswith(f"{one}.r") and t.get(key) is not None)
        t.imply("as for the first set", *given)
    t.imply("is null, or another one takes its place", *t.current)


def _val_responses(t: Translation, one: str, sampling: str, number: str) -> None:
    """Write the sampling and the number of a validation set's responses. Missing sampling is the rollout's."""
    for name, target in EVAL_SAMPLING.items():
        key, sampled = f"{one}.rollout_args.{name}", t.tree.get(f"nodes.rollout.sampling.{target}")
        if t.get(key) is not None:
            t.write(f"{sampling}.{target}", t.get(key), key)
        elif sampled is not None:
            t.put(f"{sampling}.{target}", sampled)
    key = f"{one}.repeat_times"
    if t.number(key, 1) > 1 or sampling.startswith("data."):
        t.write(number, t.number(key, 1), key)
    else:
        t.imply("one response, as by default", key)
    others = [key for key in t.current if key.startswith(f"{one}.rollout_args.") and t.get(key) is not None]
    t.refuse("has no counterpart in `sampling`", *(option for option in others if not t.is_recorded(option)))


def _server(t: Translation) -> None:
    key = f"{MODEL}.engine_type"
    backend = "sglang" if "sglang" in str(t.get(key)) else "vllm"
    generator(t, backend, key)
    tensor, memory = f"{MODEL}.tensor_parallel_size", f"{MODEL}.gpu_memory_utilization"
    if t.number(tensor, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(tensor), tensor)
    else:
        t.imply("is 1, as by default", tensor)
    t.write(server_key(t, "memory"), t.get(memory), memory)
    if t.given(f"{MODEL}.enforce_eager"):
        t.write(server_key(t, "eager"), t.get(f"{MODEL}.enforce_eager"), f"{MODEL}.enforce_eager")
    prefix = f"{MODEL}.enable_prefix_caching"
    if t.given(prefix):
        if backend == "vllm":
            t.write("engines.generator.server.enable_prefix_caching", t.get(prefix), prefix)
        else:
            t.write("engines.generator.server.disable_radix_cache", not t.get(prefix), prefix)
    for name in ("enable_chunked_prefill", "data_parallel_size", "enable_expert_parallel"):
        each = f"{MODEL}.{name}"
        if t.given(each) and backend == "vllm":
            t.write(f"engines.generator.server.{name}", t.get(each), each)
    extra = f"{MODEL}.extra_engine_args."
    for each in t.current:
        if each.startswith(extra):
            library_field(t, each, "generator", "server", each.removeprefix(extra))


def _over_rollout(t: Translation) -> None:
    key = "explorer.over_rollout.ratio"
    ratio, prompts = t.number(key, 0), t.tree["data.prompts_per_step"]
    if ratio:
        t.write("nodes.rollout.over_sampling_batch_size", prompts, key, note="all of the batch")
        t.write(
            "data.prompts_per_step", max(1, math.floor(prompts * (1 - ratio))), key, note="those that are waited for"
        )
    t.refuse("the first complete prompts make the step", *(k for k in t.current if not t.is_recorded(k)))


EXPLORER = (
    joint(
        _rollout,
        under(
            TASKS,
            "taskset.rollout_args.temperature taskset.rollout_args.top_p taskset.rollout_args.top_k "
            "eval_tasksets.*.rollout_args.* eval_tasksets.*.repeat_times",
        ),
        *(f"{prefix}.{name}" for prefix in ("model", MODEL) for name in ("temperature", "top_p", "top_k")),
        always=True,
    ),
    joint(
        _server,
        under(
            MODEL,
            "engine_type tensor_parallel_size gpu_memory_utilization enforce_eager "
            "enable_prefix_caching enable_chunked_prefill data_parallel_size enable_expert_parallel "
            "extra_engine_args.*",
        ),
        always=True,
    ),
    joint(_over_rollout, "explorer.over_rollout.*"),
)


_ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "reinforceplusplus": "reinforce_plus_plus",
    "rloo": "rloo",
    "remax": "remax",
    "opmd": "opmd",
    "gigpo": "gigpo",
}
_LOSSES = {
    "ppo": "ppo_clip",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "topr": "topr",
    "opmd": "opmd",
    "m2po": "m2po",
}
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (0.0003, 0.0004), "cispo": (None, 0.28)}
"""Trinity's default bounds of the ratio."""
_CLIP_KEYS = ("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c")


def _algorithm(t: Translation) -> None:
    key, advantage = "algorithm.algorithm_type", "algorithm.advantage_fn"
    kind = t.get(key)
    t.put("nodes.advantage.op", "advantage")
    put_node(t, "update", "update", "actor")
    name = t.get(advantage) or type_default(t, 0)
    if kind not in TYPES:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart here, or is a pipeline of its own (docs/offline.md); grpo stands in", key)
        return
    if name in _ESTIMATORS:
        t.write("nodes.advantage.estimator", _ESTIMATORS[name], *((advantage,) if t.given(advantage) else (key,)))
        if t.given(advantage):
            t.write("nodes.advantage.estimator", _ESTIMATORS[name], key, advantage)
    else:
        t.put("nodes.advantage.estimator", "grpo")
        t.refuse("has no counterpart: an estimator of your own (docs/your_own.md); grpo stands in", advantage, key)
    arguments = {
        "gamma": "gamma",
        "lam": "lam",
        "opmd_baseline": "baseline",
        "tau": "tau",
        "omega": "step_coef",
        "std_cal_level": "normalize_by_std",
    }
    for option, target in arguments.items():
        each = f"algorithm.advantage_fn_args.{option}"
        t.copy(each, f"nodes.advantage.{target}")
    std = "algorithm.advantage_fn_args.std_threshold"
    if t.number(std):
        t.write("nodes.keep.op", "filter", std)
        t.write("nodes.keep.min_std", t.get(std), std)
    if uses_critic(t):
        put_critic_nodes(t)
        t.put("nodes.critic.mini_batch", t.tree["nodes.update.mini_batch"])
        path = "model.critic_model_path"
        if is_known(t.get(path)) and t.get(path) not in ("", t.get("model.model_path")):
            t.write("engines.critic.model.path", t.get(path), path)
        else:
            t.imply("the critic starts from the policy's weights", path)


def _loss(t: Translation) -> None:
    key, prefix = "algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args"
    name = t.get(key) or type_default(t, 1)
    if name not in _LOSSES:
        arguments = [option for option in t.current if option.startswith(f"{prefix}.")]
        t.refuse("has no counterpart: a loss of your own (docs/your_own.md); ppo stands in", key, *arguments)
        t.write(
            "nodes.update.loss.aggregation", t.get("algorithm.loss_agg_mode") or "token-mean", "algorithm.loss_agg_mode"
        )
        return
    if name != "ppo" or t.given(key):
        t.write("nodes.update.loss.policy", _LOSSES[name], key if t.given(key) else "algorithm.algorithm_type")
    if name in _CLIPS:
        _clip(t, name, prefix)
    if name == "m2po":
        t.put("nodes.held.op", "covariance")
        bound = f"{prefix}.m2_threshold"
        t.write("nodes.held.second_moment", t.get(bound, 0.04), bound)
    for option in ("tau", "tau_pos", "tau_neg"):
        t.copy(f"{prefix}.{option}", f"nodes.update.loss.{option}")
    mode = f"{prefix}.loss_agg_mode" if t.given(f"{prefix}.loss_agg_mode") else "algorithm.loss_agg_mode"
    if name != "gspo" or t.given(mode):
        t.write("nodes.update.loss.aggregation", t.get(mode) or "token-mean", mode)
    entropy = "algorithm.entropy_loss_fn_args.entropy_coef"
    t.write("nodes.update.loss.entropy_coef", t.get(entropy, 0.0), entropy)
    t.imply("a coefficient of 0 switches it off", "algorithm.entropy_loss_fn")


def _clip(t: Translation, name: str, prefix: str) -> None:
    low, high = _CLIPS[name]
    both = f"{prefix}.clip_range"
    for target, key, default in (
        ("clip_ratio", f"{prefix}.clip_range_low", low),
        ("clip_ratio_high", f"{prefix}.clip_range_high", high),
    ):
        used = key if t.given(key) or not t.given(both) else both
        value = t.get(used, default)
        if value is not None and not (name == "cispo" and target == "clip_ratio"):
            t.write(f"nodes.update.loss.{target}", value, used)
    dual = f"{prefix}.clip_ratio_c"
    if name == "ppo":
        t.write("nodes.update.loss.dual_clip", t.get(dual, 3.0), dual)


def _divergence(t: Translation) -> None:
    key, coef = "algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef"
    name = t.get(key) or type_default(t, 2)
    estimator = kl_estimator(name)
    if name in (None, "none"):
        t.imply("there is no divergence in the loss", key, coef)
    elif estimator is None:
        t.refuse("estimators are k1, k2, k3 and abs", key)
    else:
        t.write("nodes.update.loss.kl_estimator", estimator, key)
        t.write("nodes.update.loss.kl_coef", t.get(coef, 0.001), coef)
    penalty, prefix = "algorithm.kl_penalty_fn", "algorithm.kl_penalty_fn_args"
    if t.get(penalty) in (None, "none"):
        t.imply("there is no divergence in the reward", penalty, *(k for k in t.current if k.startswith(prefix)))
    else:
        t.write("nodes.advantage.kl_in_reward.coef", t.get(f"{prefix}.kl_coef", 0.001), f"{prefix}.kl_coef")
        t.write("nodes.advantage.kl_in_reward.estimator", kl_estimator(t.get(penalty)) or "k1", penalty)
        if t.flag(f"{prefix}.adaptive"):
            for name in ("target_kl", "horizon"):
                t.write(
                    f"nodes.advantage.kl_in_reward.{name}",
                    t.get(f"{prefix}.{name}"),
                    f"{prefix}.{name}",
                    f"{prefix}.adaptive",
                )
    bypass = "algorithm.bypass_old_logprobs"
    if t.get(bypass) is False or "nodes.advantage.kl_in_reward.coef" in t.tree:
        put_logprob(t, "old", "actor", "old_logprob")
        t.imply("`nodes.old` computes them", bypass)
    else:
        t.write(
            "nodes.update.read", {"old_logprob": "rollout_logprob"}, bypass, note="ratios to the explorer's log-probs"
        )
        if t.tree.get("nodes.update.loss.policy") == "m2po":
            put_logprob(t, "old", "actor", "old_logprob")
    put_reference(t)


ALGORITHM = (
    joint(
        _algorithm,
        "algorithm.algorithm_type algorithm.advantage_fn algorithm.advantage_fn_args.* model.critic_model_path",
        always=True,
    ),
    joint(
        _loss,
        "algorithm.policy_loss_fn algorithm.policy_loss_fn_args.* algorithm.loss_agg_mode "
        "algorithm.entropy_loss_fn algorithm.entropy_loss_fn_args.* "
        "algorithm.entropy_loss_fn_args.entropy_coef",
        *(f"algorithm.policy_loss_fn_args.{name}" for name in _CLIP_KEYS),
        always=True,
    ),
    joint(
        _divergence,
        "algorithm.kl_loss_fn algorithm.kl_loss_fn_args.kl_coef algorithm.kl_penalty_fn "
        "algorithm.kl_penalty_fn_args.* algorithm.bypass_old_logprobs",
        always=True,
    ),
)


def _reward(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    # A task set's own types go first.
    flow, key = (
        next(
            (option for option in (f"{TASKS}.taskset.{name}", f"{TASKS}.{name}") if t.given(option)), f"{TASKS}.{name}"
        )
        for name in ("default_workflow_type", "default_reward_fn_type")
    )
    value = str(t.get(key) or "")
    if value in ("", "None", "math_reward", "math_boxed_reward", "math_dapo_reward", "accuracy_reward") and "math" in (
        value + str(t.get(flow))
    ):
        t.write(
            "nodes.reward.fn",
            "math",
            *(option for option in (key, flow) if t.given(option)),
            note="without points for the format" + (DAPO if "dapo" in value else ""),
        )
    else:
        t.put("nodes.reward.fn", "math")
        t.note(key if t.given(key) else flow, "nodes.reward.fn", "set `fn`: math, or your own; math stands in")
    for each in (f"{TASKS}.default_workflow_type", f"{TASKS}.taskset.default_workflow_type"):
        if "math" in str(t.get(each)):
            t.imply("one response to a question", each)
        elif t.given(each):
            t.refuse("a Workflow of your own is `nodes.rollout.agent` (docs/gateway.md)", each)


def _penalty(t: Translation) -> None:
    prefix = f"{TASKS}.taskset.reward_fn_args"
    if t.flag(f"{prefix}.enable_overlong_penalty"):
        t.write(
            "nodes.advantage.overlong_buffer.len",
            t.get(f"{prefix}.cache_length"),
            f"{prefix}.cache_length",
            f"{prefix}.enable_overlong_penalty",
        )
        t.write(
            "nodes.advantage.overlong_buffer.penalty_factor",
            t.get(f"{prefix}.penalty_factor", 1.0),
            f"{prefix}.penalty_factor",
        )
        t.imply("the penalty ends at `max_new_tokens`", f"{prefix}.max_response_length")
    t.refuse("arguments of the function are `nodes.reward.args`", *(key for key in t.current if not t.is_recorded(key)))


def _operators(t: Translation) -> None:
    for key in t.current:
        name = t.get(key)
        if not key.endswith(".name"):
            continue
        if name in ("dapo_dynamic_sampling", "reward_std_filter", "reward_filter"):
            t.write("nodes.keep.op", "filter", key)
            threshold = key.removesuffix(".name") + ".args.threshold"
            if t.number(threshold):
                t.write("nodes.keep.min_std", t.get(threshold), threshold)
        elif name == "mask_response_truncated":
            t.refuse("a mask of your own leaves them out (docs/migration.md)", key)
        else:
            t.refuse("has no counterpart: a node of your own (docs/your_own.md)", key)
    t.refuse("samples are trained on in their own step", *(key for key in t.current if not t.is_recorded(key)))


REWARD = (
    joint(
        _reward,
        under(
            TASKS,
            "default_workflow_type default_reward_fn_type taskset.default_workflow_type taskset.default_reward_fn_type",
        ),
        always=True,
    ),
    joint(_penalty, under(TASKS, "taskset.reward_fn_args.*")),
    joint(_operators, "data_processor.experience_pipeline.operators.*"),
)


def _mode(t: Translation) -> None:
    if t.get("mode") in ("both", "colocate"):
        t.imply("`dagrl run` is both", "mode")
    elif t.get("mode") == "bench" and has_val_data(t):
        t.write("run.val_only", True, "mode", note="only the newest checkpoint")
    else:
        t.refuse("is `dagrl run --only NODES`, with the nodes of one of the two (docs/explore_train.md)", "mode")


def _steps(t: Translation) -> None:
    total, epochs, syncs = "buffer.total_steps", "buffer.total_epochs", interval_of(t)
    limit = "trainer.total_steps"
    key = next((key for key in (total, limit) if t.number(key) or isinstance(t.get(key), Unresolved)), None)
    if key:
        steps = t.get(key) if isinstance(t.get(key), Unresolved) else max(1, t.get(key) // syncs)
        t.write("run.steps", steps, key, note=f"/ sync_interval {syncs}" if syncs > 1 else "")
        t.imply("the steps take its place", epochs)
        return
    write_epochs(t, epochs)


def _every(t: Translation) -> None:
    syncs = interval_of(t)
    note = f"/ sync_interval {syncs}" if syncs > 1 else ""
    save = "trainer.save_interval"
    if t.number(save, 0):
        t.write("run.save_every", max(1, t.get(save) // syncs), save, note=note)
    if not has_val_data(t):
        t.imply("there is no validation without eval_tasksets", "explorer.eval_interval", "explorer.eval_on_startup")
        return
    interval, first = "explorer.eval_interval", "explorer.eval_on_startup"
    t.write("run.validate_every", max(1, t.number(interval, 100) // syncs), interval, note=note or "")
    t.write("run.validate_first", t.get(first), first)


RUN = (
    named("name"),
    joint(_mode, "mode"),
    joint(_steps, "buffer.total_steps buffer.total_epochs trainer.total_steps", always=True),
    joint(_every, "trainer.save_interval explorer.eval_interval explorer.eval_on_startup", always=True),
    joint(lambda t: keep(t, "trainer.max_checkpoints_to_keep"), "trainer.max_checkpoints_to_keep", always=True),
    tracked("monitor.monitor_type", project="project", group="group"),
)


def _replay(t: Translation) -> None:
    prefix = "buffer.trainer_input.experience_buffer.replay_buffer"
    if not t.flag(f"{prefix}.enable"):
        t.imply("a step trains on its own samples", *t.current)
        return
    groups = t.tree.get("data.prompts_per_step", 1)
    t.put("nodes.replay.op", "buffer")
    note = "as many groups again as a step has: there, however many are ready sooner than new ones"
    t.write("nodes.replay.groups_per_step", groups, f"{prefix}.enable", note=note)
    note = "those that have returned least: there, newer ones first"
    t.write("nodes.replay.policy", "fifo", f"{prefix}.priority_fn", note=note)
    bounds = t.below(f"{prefix}.priority_fn_args")
    t.refuse("`max_age` and `max_uses` of the buffer bound what returns", *bounds)
    t.imply("a group returns in later steps alone", f"{prefix}.reuse_cooldown_time")


REPLAY = (
    joint(_replay, "buffer.trainer_input.experience_buffer.replay_buffer.*"),
    implied(
        "samples are in Ray's object store, and on disk with a buffer",
        "buffer.trainer_input.experience_buffer.name buffer.trainer_input.experience_buffer.storage_type "
        "buffer.trainer_input.experience_buffer.path buffer.trainer_input.experience_buffer.capacity "
        "buffer.trainer_input.experience_buffer.max_read_timeout",
    ),
)


REST = (
    refused_unless(
        (1.0, 0, None),
        "log-probs would be those of another policy",
        "model.repetition_penalty model.min_response_tokens",
    ),
    refused("prepare the file beforehand", "data_processor.* service*"),
    refused(
        "files of experience are read by `dagrl run --only` (docs/explore_train.md)",
        "buffer.trainer_input.experience_buffer.*",
    ),
    refused(
        "experts' responses are `{op: mix}` with `data.responses` (docs/offline.md)",
        "buffer.trainer_input.auxiliary_buffers* algorithm.sample_strategy*",
    ),
    refused("an engine that follows none judges: {op: judge} (docs/rewards.md)", "explorer.auxiliary_models*"),
    refused("a run for each stage, from what `dagrl export` makes of the one before", "stages*"),
    refused("is a tool or an environment (docs/multi_turn.md)", under(TASKS, "taskset.workflow_args* *workflow_args*")),
    implied(
        "columns are those of the converted file",
        under(TASKS, "eval_tasksets.*.format.* eval_tasksets.*.storage_type eval_tasksets.*.subset_name"),
    ),
    refused("all validation sets share reward and format", under(TASKS, "eval_tasksets.* default_eval_workflow_type")),
    refused("several task sets are one file", under(TASKS, "tasksets.*")),
    refused("trackers read their own environment", "monitor.monitor_args*"),
    implied(
        "`nodes.rollout.tool_timeout_s` bounds a call, `on_environment_error` says what follows",
        "explorer.max_timeout explorer.max_retry_times",
    ),
    implied(
        "is `dagrl run --run-dir DIR`; a run goes on in its folder by itself",
        "checkpoint_root_dir continue_from_checkpoint trainer.save_hf_checkpoint",
    ),
    implied("`sleep: auto` offloads where engines share GPUs", "trainer.*offload*"),
    implied(
        "follows from the pipeline",
        under(TASKS, "taskset.*"),
        under(MODEL, "*"),
        "model.* explorer.* synchronizer.* monitor.* trainer.trainer_type trainer.balance_batch "
        "trainer.enable_preview trainer.save_strategy trainer.* buffer.* cluster.* log* ray_namespace "
        "ignore_validator_suggestions algorithm.optimizer.* algorithm.enable_router_replay",
    ),
)
