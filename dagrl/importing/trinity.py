"""Trinity-RFT: its YAML. Each of its steps is one optimizer step; weights go over every ``sync_interval`` of them."""

from __future__ import annotations

import math
import re
from typing import Any

from dagrl.importing.parts import (
    STANDS_IN_STEPS,
    data_file,
    generator,
    is_known,
    library_field,
    library_fields,
    name_of,
    put_groups,
    put_logprob,
    put_reference,
    rows_of,
    server_key,
    trackers,
)
from dagrl.importing.table import Framework, Rule, Translation, implied, joint, refused, refused_unless, to
from dagrl.importing.verl.actor import PARALLEL, kl_estimator
from dagrl.importing.verl.common import FSDP

_DEFAULTS: dict[str, Any] = {
    "mode": "both",
    "name": "rft",
    "algorithm.algorithm_type": "ppo",
    "algorithm.optimizer.lr": 1.0e-6,
    "algorithm.optimizer.weight_decay": 0.01,
    "algorithm.optimizer.min_lr_ratio": 0.01,
    "algorithm.bypass_old_logprobs": True,
    "buffer.batch_size": 1,
    "buffer.total_epochs": 1,
    "cluster.node_num": 1,
    "cluster.gpu_per_node": 8,
    "explorer.rollout_model.engine_type": "vllm",
    "explorer.rollout_model.engine_num": 1,
    "explorer.rollout_model.tensor_parallel_size": 1,
    "explorer.rollout_model.gpu_memory_utilization": 0.9,
    "explorer.eval_interval": 100,
    "explorer.eval_on_startup": True,
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
    "trainer.grad_clip": 1.0,
    "trainer.ulysses_sequence_parallel_size": 1,
    "monitor.monitor_type": "tensorboard",
}
_TYPES = {
    "ppo": ("ppo", "ppo", "k2", 1),
    "grpo": ("grpo", "ppo", "k2", 2),
    "dapo": ("grpo", "ppo", "none", 16),
    "reinforceplusplus": ("reinforceplusplus", "ppo", "k2", 2),
    "rloo": ("rloo", "ppo", "k2", 2),
    "opmd": ("opmd", "opmd", "k2", 2),
    "topr": ("reinforce", "topr", "k2", 2),
    "cispo": ("grpo", "cispo", "k2", 2),
    "gspo": ("grpo", "gspo", "k2", 2),
    "sapo": ("grpo", "sapo", "k2", 2),
    "gigpo": ("gigpo", "ppo", "k2", 8),
}
"""``algorithm_type`` -> its defaults of ``advantage_fn``, ``policy_loss_fn``, ``kl_loss_fn`` and ``repeat_times``."""
_ESTIMATORS = {
    "ppo": "gae",
    "grpo": "grpo",
    "reinforceplusplus": "reinforce_plus_plus",
    "rloo": "rloo",
    "remax": "remax",
    "opmd": "opmd",
    "gigpo": "gigpo",
}
_LOSSES = {"ppo": "ppo_clip", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo", "topr": "topr", "opmd": "opmd"}
_CLIPS = {"ppo": (0.2, 0.2), "gspo": (0.0003, 0.0004), "cispo": (None, 0.28)}
"""Trinity's default bounds of the ratio."""
_MODEL = "explorer.rollout_model"
_TASKS = "buffer.explorer_input"
_VERL = "trainer.trainer_config"
_CLIP_KEYS = ("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c")


def _type(t: Translation, index: int) -> Any:
    return _TYPES.get(str(t.get("algorithm.algorithm_type")), (None, None, "none", 1))[index]


def _uses_critic(t: Translation) -> bool:
    return (t.get("algorithm.advantage_fn") or _type(t, 0)) == "ppo"


def _interval(t: Translation) -> int:
    return max(1, int(t.number("synchronizer.sync_interval", 1)))


def _is_megatron(t: Translation) -> bool:
    strategies = (t.get("trainer.trainer_strategy"), t.get(f"{_VERL}.actor_rollout_ref.actor.strategy"))
    return "megatron" in strategies


def _groups(t: Translation) -> None:
    """Explorer and trainer have GPUs of their own: the engines' first, the rest for the trainer."""
    nodes, gpus = t.number("cluster.node_num", 1), t.number("cluster.gpu_per_node", 8)
    number, tensor = f"{_MODEL}.engine_num", f"{_MODEL}.tensor_parallel_size"
    each = t.number(tensor, 1) * t.number(f"{_MODEL}.data_parallel_size", 1)
    rollout = int(t.number(number, 1) * each)
    total = int(nodes * gpus)
    keys = ("cluster.node_num", "cluster.gpu_per_node", number, tensor)
    if t.get("mode") == "colocate" or rollout >= total:
        put_groups(t, {"gpus": (int(nodes), int(gpus))})
        t.write("groups.gpus.gpus_per_node", int(gpus), *keys[:2])
        t.put("engines.actor.group", "gpus")
        t.put("engines.generator.group", "gpus")
        t.imply("engines fill the group", number)
    else:
        train = total - rollout
        machines = {name: _split(count, int(gpus)) for name, count in (("train", train), ("rollout", rollout))}
        put_groups(t, machines)
        note = f"{rollout} GPUs of {total} for the engines, {train} for the trainer"
        t.write("groups.train.gpus_per_node", machines["train"][1], *keys[:3], note=note)
        t.write("groups.rollout.gpus_per_node", machines["rollout"][1], number, note=note)
        t.put("engines.actor.group", "train")
        t.put("engines.generator.group", "rollout")
    if _uses_critic(t):
        t.put("engines.critic.group", t.tree["engines.actor.group"])
    t.put("engines.actor.backend", "megatron")


def _split(count: int, machine: int) -> tuple[int, int]:
    if count <= machine:
        return 1, count
    nodes = next(n for n in range(-(-count // machine), count + 1) if count % n == 0)
    return nodes, count // nodes


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
    if not t.number(response) and t.number(whole) and t.number(prompt):
        rest = t.get(whole) - t.get(prompt)
        t.write("nodes.rollout.sampling.max_new_tokens", rest, whole, note="less the prompt")


def _file(path: Any, split: Any) -> Any:
    """The parquet file of a data set that Trinity loads by name and split."""
    text = str(path)
    if re.search(r"\.(parquet|jsonl?|csv)$", text):
        return data_file(path)
    return f"data/{text.rstrip('/').rpartition('/')[2].lower()}/{split or 'train'}.parquet"


def _data(t: Translation) -> None:
    prefix = f"{_TASKS}.taskset" if t.given(f"{_TASKS}.taskset.path") else f"{_TASKS}.tasksets.0"
    key, split = f"{prefix}.path", f"{prefix}.split"
    if t.given(key):
        keys = tuple(each for each in (key, split) if t.given(each))
        t.write("data.train", _file(t.get(key), t.get(split)), *keys, note="convert it once (docs/data.md)")
    index = 0
    while t.given(f"{_TASKS}.eval_tasksets.{index}.path"):
        one = f"{_TASKS}.eval_tasksets.{index}"
        label = re.sub(r"\W", "_", str(t.get(f"{one}.name", f"set_{index}")).lower())
        label = label if label[:1].isalpha() else f"set_{index}"
        file = _file(t.get(f"{one}.path"), t.get(f"{one}.split"))
        keys = tuple(f"{one}.{name}" for name in ("path", "split", "name") if t.given(f"{one}.{name}"))
        t.write(f"data.val.{label}", file, *keys, note="convert it once (docs/data.md)")
        index += 1
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
    each, syncs = t.number(batch, 1), _interval(t)
    t.write("nodes.update.mini_batch", each, batch)
    note = f"{each} x {syncs} optimizer steps between two syncs"
    t.write("data.prompts_per_step", each * syncs, batch, *((interval,) if t.given(interval) else ()), note=note)
    n = t.number("algorithm.repeat_times") or _type(t, 3)
    t.write("nodes.rollout.n", n, "algorithm.repeat_times")
    if t.number(trained, 0) and t.get(trained) != each * n:
        if t.get(trained) % n == 0:
            t.write("nodes.update.mini_batch", t.get(trained) // n, trained, note=f"{t.get(trained)} samples / {n}")
        else:
            t.refuse("a mini-batch has whole groups", trained)
    else:
        t.imply("is `batch_size` times `repeat_times`", trained)


def _steps(t: Translation) -> None:
    total, epochs, syncs = "buffer.total_steps", "buffer.total_epochs", _interval(t)
    limit = "trainer.total_steps"
    key = next((each for each in (total, limit) if t.number(each)), None)
    if key:
        t.write("run.steps", max(1, t.get(key) // syncs), key, note=f"/ sync_interval {syncs}" if syncs > 1 else "")
        t.imply("the steps take its place", epochs)
        return
    prompts, rows = t.tree["data.prompts_per_step"], rows_of(t, t.tree.get("data.train"))
    if rows and rows >= prompts:
        note = f"{t.get(epochs)} epochs of {rows} prompts, {prompts} in a step"
        t.write("run.steps", t.number(epochs, 1) * rows // prompts, epochs, note=note)
        return
    t.put("run.steps", STANDS_IN_STEPS)
    reason = f"{t.get(epochs)} epochs x prompts // {prompts}; the file is not here, so {STANDS_IN_STEPS} stands in"
    t.note(epochs, "run.steps", reason, t.get(epochs))


def _every(t: Translation) -> None:
    syncs = _interval(t)
    note = f"/ sync_interval {syncs}" if syncs > 1 else ""
    save = "trainer.save_interval"
    if t.number(save, 0):
        t.write("run.save_every", max(1, t.get(save) // syncs), save, note=note)
    if not any(key.startswith("data.val") for key in t.tree):
        t.imply("there is no validation without eval_tasksets", "explorer.eval_interval", "explorer.eval_on_startup")
        return
    interval, first = "explorer.eval_interval", "explorer.eval_on_startup"
    t.write("run.validate_every", max(1, t.number(interval, 100) // syncs), interval, note=note or "")
    t.write("run.validate_first", t.get(first), first)


def _rollout(t: Translation) -> None:
    t.put("nodes.rollout.op", "rollout")
    t.put("nodes.rollout.engine", "generator")
    for name in ("temperature", "top_p", "top_k"):
        keys = [f"{_TASKS}.taskset.rollout_args.{name}", f"model.{name}", f"{_MODEL}.{name}"]
        key = next((each for each in keys if t.given(each) and t.get(each) is not None), None)
        if key:
            t.write(f"nodes.rollout.sampling.{name}", t.get(key), key)
            t.imply("the task set's takes its place", *(each for each in keys if each != key))
    one = f"{_TASKS}.eval_tasksets.0"
    given = [name for name in ("temperature", "top_p", "top_k") if t.given(f"{one}.rollout_args.{name}")]
    if any(key.startswith("data.val") for key in t.tree):
        # Trinity validates with the rollout's sampling where a set has none of its own.
        for name in ("temperature", "top_p", "top_k"):
            sampled = t.tree.get(f"nodes.rollout.sampling.{name}")
            if name in given:
                t.write(
                    f"nodes.rollout.val_sampling.{name}",
                    t.get(f"{one}.rollout_args.{name}"),
                    f"{one}.rollout_args.{name}",
                )
            elif sampled is not None:
                t.put(f"nodes.rollout.val_sampling.{name}", sampled)
        t.put("nodes.rollout.val_sampling.max_new_tokens", t.tree.get("nodes.rollout.sampling.max_new_tokens"))
        count = f"{one}.repeat_times"
        if t.number(count, 1) > 1:
            t.write("nodes.rollout.val_n", t.get(count), count)
        else:
            t.imply("one response, as by default", count)
    rest = [key for key in t.current if not t.is_recorded(key)]
    one_for_all = "all validation sets have the sampling and the number of the first one"
    t.refuse(one_for_all, *(key for key in rest if "eval_tasksets" in key))
    t.imply("is null, or another one takes its place", *(key for key in rest if "eval_tasksets" not in key))


def _server(t: Translation) -> None:
    key = f"{_MODEL}.engine_type"
    backend = "sglang" if "sglang" in str(t.get(key)) else "vllm"
    generator(t, backend, key)
    tensor, memory = f"{_MODEL}.tensor_parallel_size", f"{_MODEL}.gpu_memory_utilization"
    if t.number(tensor, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(tensor), tensor)
    else:
        t.imply("is 1, as by default", tensor)
    t.write(server_key(t, "memory"), t.get(memory), memory)
    if t.given(f"{_MODEL}.enforce_eager"):
        t.write(server_key(t, "eager"), t.get(f"{_MODEL}.enforce_eager"), f"{_MODEL}.enforce_eager")
    prefix = f"{_MODEL}.enable_prefix_caching"
    if t.given(prefix):
        if backend == "vllm":
            t.write("engines.generator.server.enable_prefix_caching", t.get(prefix), prefix)
        else:
            t.write("engines.generator.server.disable_radix_cache", not t.get(prefix), prefix)
    for name in ("enable_chunked_prefill", "data_parallel_size", "enable_expert_parallel"):
        each = f"{_MODEL}.{name}"
        if t.given(each) and backend == "vllm":
            t.write(f"engines.generator.server.{name}", t.get(each), each)
    extra = f"{_MODEL}.extra_engine_args."
    for each in t.current:
        if each.startswith(extra):
            library_field(t, each, "generator", "server", each.removeprefix(extra))


def _trainer(t: Translation) -> None:
    key = "trainer.trainer_strategy"
    if _is_megatron(t):
        t.write("engines.actor.backend", "megatron", key, f"{_VERL}.actor_rollout_ref.actor.strategy")
    else:
        t.refuse(FSDP, key, f"{_VERL}.actor_rollout_ref.actor.strategy")
    engines = ("actor", "critic") if _uses_critic(t) else ("actor",)
    if _uses_critic(t):
        t.put("engines.critic.backend", "megatron")
        t.put("engines.critic.head", "value")
    for name in (*PARALLEL, "sequence_parallel"):
        keys = (f"trainer.megatron.{name}", f"{_VERL}.actor_rollout_ref.actor.megatron.{name}")
        given = next((each for each in keys if t.given(each) and is_known(t.get(each))), None)
        if given and _is_megatron(t):
            for engine in engines:
                t.write(f"engines.{engine}.parallel.{name}", t.get(given), given)
    sequence = "trainer.ulysses_sequence_parallel_size"
    if not _is_megatron(t):
        if t.number(sequence, 1) > 1:
            for engine in engines:
                t.write(f"engines.{engine}.parallel.context_parallel_size", t.get(sequence), sequence)
        for engine in engines:
            for name, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
                t.put(f"engines.{engine}.transformer.recompute_{name}", value)
    t.imply("is 1, as by default", sequence)


def _tokens(t: Translation) -> None:
    parallel = max(
        t.number("trainer.ulysses_sequence_parallel_size", 1), t.number("trainer.megatron.context_parallel_size", 1)
    )
    keys = ("trainer.max_token_len_per_gpu", f"{_VERL}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    key = next((each for each in keys if t.number(each)), None)
    if key:
        for node in ("update", "old", "ref", "values", "critic"):
            if f"nodes.{node}.op" in t.tree:
                t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key) * parallel, key)
    t.imply(
        "rows are always packed by `tokens_per_micro_batch`", "trainer.use_dynamic_bsz", "trainer.use_remove_padding"
    )


def _optimizer(t: Translation) -> None:
    lr = "algorithm.optimizer.lr"
    old = f"{_VERL}.actor_rollout_ref.actor.optim.lr"
    key = lr if t.given(lr) or not t.given(old) else old
    t.write("engines.actor.optimizer.lr", t.get(key), key)
    decay = "algorithm.optimizer.weight_decay"
    t.write("engines.actor.optimizer.weight_decay", t.get(decay), decay)
    clip = "trainer.grad_clip"
    t.write("engines.actor.optimizer.clip_grad", t.get(clip), clip)
    if _uses_critic(t):
        critic = f"{_VERL}.critic.optim.lr"
        t.write("engines.critic.optimizer.lr", t.get(critic, 1.0e-5), critic)
    betas = t.get("algorithm.optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            t.write(f"engines.actor.optimizer.{name}", beta, "algorithm.optimizer.betas")
    syncs, schedule = _interval(t), "engines.actor.lr_schedule"
    warmup = next(
        (
            key
            for key in ("algorithm.optimizer.lr_warmup_steps", f"{_VERL}.actor_rollout_ref.actor.optim.lr_warmup_steps")
            if t.number(key, 0) > 0
        ),
        None,
    )
    if warmup:
        t.write(
            f"{schedule}.lr_warmup_steps",
            -(-t.get(warmup) // syncs),
            warmup,
            note=f"/ sync_interval {syncs}" if syncs > 1 else "",
        )
    style = next(
        (
            key
            for key in ("algorithm.optimizer.lr_scheduler_type", "algorithm.optimizer.warmup_style")
            if is_known(t.get(key))
        ),
        None,
    )
    if style and t.get(style) in ("constant", "linear", "cosine"):
        t.write(f"{schedule}.lr_decay_style", t.get(style), style)
        ratio = "algorithm.optimizer.min_lr_ratio"
        if t.get(style) != "constant" and isinstance(t.tree["engines.actor.optimizer.lr"], float):
            t.write(f"{schedule}.min_lr", t.get(ratio) * t.tree["engines.actor.optimizer.lr"], ratio)
    elif style:
        t.refuse("shapes are constant, linear, cosine and inverse-square-root", style)


def _algorithm(t: Translation) -> None:
    key, advantage = "algorithm.algorithm_type", "algorithm.advantage_fn"
    kind = t.get(key)
    t.put("nodes.advantage.op", "advantage")
    t.put("nodes.update.op", "update")
    t.put("nodes.update.engine", "actor")
    name = t.get(advantage) or _type(t, 0)
    if kind not in _TYPES:
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
    arguments = {"gamma": "gamma", "lam": "lam", "opmd_baseline": "baseline", "tau": "tau", "omega": "step_coef"}
    for option, target in arguments.items():
        each = f"algorithm.advantage_fn_args.{option}"
        if t.given(each):
            t.write(f"nodes.advantage.{target}", t.get(each), each)
    std = "algorithm.advantage_fn_args.std_threshold"
    if t.number(std):
        t.write("nodes.keep.op", "filter", std)
        t.write("nodes.keep.min_std", t.get(std), std)
    if _uses_critic(t):
        for node, op in (("values", "values"), ("critic", "critic")):
            t.put(f"nodes.{node}.op", op)
            t.put(f"nodes.{node}.engine", "critic")
        t.put("nodes.critic.mini_batch", t.tree["nodes.update.mini_batch"])
        path = "model.critic_model_path"
        if is_known(t.get(path)) and t.get(path) not in ("", t.get("model.model_path")):
            t.write("engines.critic.model.path", t.get(path), path)
        else:
            t.imply("the critic starts from the policy's weights", path)


def _loss(t: Translation) -> None:
    key, prefix = "algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args"
    name = t.get(key) or _type(t, 1)
    if name not in _LOSSES:
        t.refuse("has no counterpart: a loss of your own (docs/your_own.md); ppo stands in", key)
        name = "ppo"
    if name != "ppo" or t.given(key):
        t.write("nodes.update.loss.policy", _LOSSES[name], key if t.given(key) else "algorithm.algorithm_type")
    if name in _CLIPS:
        _clip(t, name, prefix)
    for option in ("tau", "tau_pos", "tau_neg"):
        if t.given(f"{prefix}.{option}"):
            t.write(f"nodes.update.loss.{option}", t.get(f"{prefix}.{option}"), f"{prefix}.{option}")
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
    name = t.get(key) or _type(t, 2)
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
    put_reference(t)


def _ahead(t: Translation) -> None:
    offset, style, syncs = "synchronizer.sync_offset", "synchronizer.sync_style", _interval(t)
    if t.number(offset, 0):
        t.write(
            "schedule.max_staleness",
            math.ceil(t.get(offset) / syncs),
            offset,
            note=f"/ sync_interval {syncs}, rounded up",
        )
    elif "dynamic" in str(t.get(style)) or str(t.get(style)) == "explorer_driven":
        t.write("schedule.max_staleness", 2, style, note="the generator works ahead, but no further")
    else:
        t.imply("trainer and generator wait for each other", offset, style)
    method = t.get("synchronizer.sync_method")
    if method == "checkpoint":
        t.refuse("weights go over NCCL or the object store", "synchronizer.sync_method")
    else:
        t.imply("`weight_sync.route: auto` chooses", "synchronizer.sync_method")


def _reward(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    flow, key = f"{_TASKS}.default_workflow_type", f"{_TASKS}.default_reward_fn_type"
    own = f"{_TASKS}.taskset.default_reward_fn_type"
    key = own if t.given(own) else key
    value = str(t.get(key) or "")
    if value in ("", "None", "math_reward", "math_boxed_reward", "math_dapo_reward", "accuracy_reward") and "math" in (
        value + str(t.get(flow))
    ):
        t.write(
            "nodes.reward.fn",
            "math",
            *(each for each in (key, flow) if t.given(each)),
            note="without points for the format",
        )
    else:
        t.put("nodes.reward.fn", "math")
        t.note(key if t.given(key) else flow, "nodes.reward.fn", "set `fn`: math, or your own; math stands in")
    for each in (flow, f"{_TASKS}.taskset.default_workflow_type"):
        if "math" in str(t.get(each)):
            t.imply("one response to a question", each)
        elif t.given(each):
            t.refuse("a Workflow of your own is `nodes.rollout.agent` (docs/gateway.md)", each)


def _penalty(t: Translation) -> None:
    prefix = f"{_TASKS}.taskset.reward_fn_args"
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


def _over_rollout(t: Translation) -> None:
    key = "explorer.over_rollout.ratio"
    ratio, prompts = t.number(key, 0), t.tree["data.prompts_per_step"]
    if ratio:
        t.write("nodes.rollout.over_sampling_batch_size", prompts, key, note="all of the batch")
        t.write(
            "data.prompts_per_step", max(1, math.floor(prompts * (1 - ratio))), key, note="those that are waited for"
        )
    t.refuse("the first complete prompts make the step", *(k for k in t.current if not t.is_recorded(k)))


def _mode(t: Translation) -> None:
    if t.get("mode") in ("both", "colocate"):
        t.imply("`dagrl run` is both", "mode")
    else:
        t.refuse("explorer and trainer are one program: `dagrl run`", "mode")


def _lora(t: Translation) -> None:
    rank, alpha = (f"model.lora_configs.0.lora_{name}" for name in ("rank", "alpha"))
    t.write("engines.actor.lora.rank", t.get(rank, 32), rank)
    t.write("engines.actor.lora.alpha", t.get(alpha, 32), alpha)
    t.imply("all linear layers, as by default", "model.lora_configs.0.target_modules")
    t.refuse("adapters are of the policy: `engines.actor.lora`", *(k for k in t.current if not t.is_recorded(k)))


def _verl_section(pattern: str, engine: str) -> Rule:
    return library_fields(f"{_VERL}.{pattern}.megatron.override_transformer_config.*", engine, "transformer")


_RULES = (
    joint(lambda t: t.write("name", name_of(t.get("name")), "name"), "name", targets=("name",), always=True),
    joint(_mode, "mode"),
    joint(
        _groups,
        *("cluster.node_num", "cluster.gpu_per_node", f"{_MODEL}.engine_num"),
        targets=("groups",),
        always=True,
    ),
    to("model.model_path", "model.path"),
    joint(
        _lengths,
        *("model.max_prompt_tokens", "model.max_response_tokens", "model.max_model_len"),
        targets=("data.max_prompt_tokens", "nodes.rollout.sampling.max_new_tokens"),
        always=True,
    ),
    joint(
        _data,
        f"{_TASKS}.taskset.path",
        f"{_TASKS}.taskset.split",
        f"{_TASKS}.taskset.name",
        f"{_TASKS}.taskset.subset_name",
        f"{_TASKS}.taskset.storage_type",
        f"{_TASKS}.taskset.format.*",
        f"{_TASKS}.taskset.data_selector.selector_type",
        f"{_TASKS}.taskset.task_selector.selector_type",
        f"{_TASKS}.tasksets.0.*",
        *(f"{_TASKS}.eval_tasksets.*.{name}" for name in ("path", "split", "name")),
        targets=("data.train", "data.val", "data.shuffle"),
        always=True,
    ),
    joint(
        _rollout,
        *(f"{_TASKS}.taskset.rollout_args.{name}" for name in ("temperature", "top_p", "top_k")),
        *(f"{prefix}.{name}" for prefix in ("model", _MODEL) for name in ("temperature", "top_p", "top_k")),
        f"{_TASKS}.eval_tasksets.*.rollout_args.*",
        f"{_TASKS}.eval_tasksets.*.repeat_times",
        targets=("nodes.rollout.sampling", "nodes.rollout.val_sampling", "nodes.rollout.val_n"),
        always=True,
    ),
    joint(
        _batches,
        *("buffer.batch_size", "synchronizer.sync_interval", "buffer.train_batch_size", "algorithm.repeat_times"),
        targets=("nodes.update.mini_batch", "data.prompts_per_step", "nodes.rollout.n"),
        always=True,
    ),
    joint(
        _steps, "buffer.total_steps", "buffer.total_epochs", "trainer.total_steps", targets=("run.steps",), always=True
    ),
    joint(
        _every,
        *("trainer.save_interval", "explorer.eval_interval", "explorer.eval_on_startup"),
        targets=("run.save_every", "run.validate_every", "run.validate_first"),
        always=True,
    ),
    joint(
        _server,
        *(
            f"{_MODEL}.{name}"
            for name in (
                *("engine_type", "tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"),
                *("enable_prefix_caching", "enable_chunked_prefill", "data_parallel_size", "enable_expert_parallel"),
                "extra_engine_args.*",
            )
        ),
        targets=("engines.generator.backend", "engines.generator.server", "engines.generator.environment"),
        always=True,
    ),
    joint(
        _optimizer,
        *(f"algorithm.optimizer.{name}" for name in ("lr", "weight_decay", "betas", "lr_warmup_steps")),
        *(f"algorithm.optimizer.{name}" for name in ("lr_scheduler_type", "warmup_style", "min_lr_ratio")),
        "trainer.grad_clip",
        f"{_VERL}.actor_rollout_ref.actor.optim.lr",
        f"{_VERL}.actor_rollout_ref.actor.optim.lr_warmup_steps",
        f"{_VERL}.critic.optim.lr",
        targets=("engines.actor.optimizer", "engines.actor.lr_schedule"),
        always=True,
    ),
    joint(
        _algorithm,
        *(
            "algorithm.algorithm_type",
            "algorithm.advantage_fn",
            "algorithm.advantage_fn_args.*",
            "model.critic_model_path",
        ),
        targets=(
            "nodes.advantage.estimator",
            "nodes.advantage.baseline",
            "nodes.advantage.tau",
            "engines.critic.model",
        ),
        always=True,
    ),
    joint(
        _loss,
        *("algorithm.policy_loss_fn", "algorithm.policy_loss_fn_args.*", "algorithm.loss_agg_mode"),
        *(
            "algorithm.entropy_loss_fn",
            "algorithm.entropy_loss_fn_args.*",
            "algorithm.entropy_loss_fn_args.entropy_coef",
        ),
        *(f"algorithm.policy_loss_fn_args.{name}" for name in _CLIP_KEYS),
        targets=(
            *("nodes.update.loss.policy", "nodes.update.loss.clip_ratio", "nodes.update.loss.clip_ratio_high"),
            *("nodes.update.loss.dual_clip", "nodes.update.loss.entropy_coef", "nodes.update.loss.aggregation"),
        ),
        always=True,
    ),
    joint(
        _divergence,
        *("algorithm.kl_loss_fn", "algorithm.kl_loss_fn_args.kl_coef", "algorithm.kl_penalty_fn"),
        *("algorithm.kl_penalty_fn_args.*", "algorithm.bypass_old_logprobs"),
        targets=(
            "nodes.update.loss.kl_estimator",
            "nodes.update.loss.kl_coef",
            "nodes.advantage.kl_in_reward",
            "nodes.update.read",
        ),
        always=True,
    ),
    joint(
        _trainer,
        "trainer.trainer_strategy",
        f"{_VERL}.actor_rollout_ref.actor.strategy",
        "trainer.megatron.*",
        *(f"{_VERL}.actor_rollout_ref.actor.megatron.{name}" for name in (*PARALLEL, "sequence_parallel")),
        "trainer.ulysses_sequence_parallel_size",
        targets=("engines.actor.parallel",),
        always=True,
    ),
    _verl_section("actor_rollout_ref.actor", "actor"),
    joint(
        _tokens,
        "trainer.max_token_len_per_gpu",
        f"{_VERL}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "trainer.use_dynamic_bsz",
        "trainer.use_remove_padding",
        targets=("nodes.update.tokens_per_micro_batch",),
    ),
    joint(
        _ahead,
        *("synchronizer.sync_offset", "synchronizer.sync_style", "synchronizer.sync_method"),
        targets=("schedule.max_staleness", "engines.generator.weight_sync.route"),
    ),
    joint(
        _reward,
        *(f"{_TASKS}.{name}" for name in ("default_workflow_type", "default_reward_fn_type")),
        *(f"{_TASKS}.taskset.{name}" for name in ("default_workflow_type", "default_reward_fn_type")),
        targets=("nodes.reward.fn", "nodes.rollout.agent"),
        always=True,
    ),
    joint(_penalty, f"{_TASKS}.taskset.reward_fn_args.*", targets=("nodes.advantage.overlong_buffer",)),
    joint(_operators, "data_processor.experience_pipeline.operators.*", targets=("nodes.keep",)),
    joint(_over_rollout, "explorer.over_rollout.*", targets=("nodes.rollout.over_sampling_batch_size",)),
    joint(_lora, "model.lora_configs.*", targets=("engines.actor.lora",)),
    to("trainer.critic_warmup", "nodes.update.critic_warmup", convert=lambda steps: steps),
    joint(
        lambda t: trackers(t, [t.get("monitor.monitor_type")], "monitor.monitor_type"),
        "monitor.monitor_type",
        targets=("track",),
        always=True,
    ),
    refused_unless(
        (1.0, 0, None),
        "log-probs would be those of another policy",
        "model.repetition_penalty",
        "model.min_response_tokens",
    ),
    refused("prepare the file beforehand", "data_processor.*", "service*"),
    refused(
        "samples travel through Ray's object store, and are trained on in their own step",
        "buffer.trainer_input.experience_buffer.*",
    ),
    refused(
        "experts' responses are `{op: mix}` with `data.responses` (docs/offline.md)",
        "buffer.trainer_input.auxiliary_buffers*",
        "algorithm.sample_strategy*",
    ),
    refused("an engine that follows none judges: {op: judge} (docs/rewards.md)", "explorer.auxiliary_models*"),
    refused("a run for each stage, from what `dagrl export` makes of the one before", "stages*"),
    refused("runs have one name", "project", "group"),
    refused(
        "is a tool or an environment (docs/multi_turn.md)",
        f"{_TASKS}.taskset.workflow_args*",
        f"{_TASKS}.*workflow_args*",
    ),
    implied(
        "columns are those of the converted file",
        f"{_TASKS}.eval_tasksets.*.format.*",
        f"{_TASKS}.eval_tasksets.*.storage_type",
        f"{_TASKS}.eval_tasksets.*.subset_name",
    ),
    refused(
        "all validation sets share reward and format",
        f"{_TASKS}.eval_tasksets.*",
        f"{_TASKS}.default_eval_workflow_type",
    ),
    refused("several task sets are one file", f"{_TASKS}.tasksets.*"),
    refused("trackers read their own environment", "monitor.monitor_args*"),
    implied(
        "`nodes.rollout.tool_timeout_s` bounds a call, `on_environment_error` says what follows",
        "explorer.max_timeout",
        "explorer.max_retry_times",
    ),
    implied(
        "is `dagrl run --run-dir DIR`; a run goes on in its folder by itself",
        "checkpoint_root_dir",
        "continue_from_checkpoint",
        "trainer.save_hf_checkpoint",
    ),
    implied("`sleep: auto` offloads where engines share GPUs", "trainer.*offload*"),
    implied(
        "follows from the pipeline",
        f"{_TASKS}.taskset.*",
        f"{_MODEL}.*",
        "model.*",
        "explorer.*",
        "synchronizer.*",
        "monitor.*",
        "trainer.trainer_type",
        "trainer.balance_batch",
        "trainer.enable_preview",
        "trainer.save_strategy",
        "trainer.max_checkpoints_to_keep",
        "trainer.*",
        "buffer.*",
        "cluster.*",
        "log*",
        "ray_namespace",
        "ignore_validator_suggestions",
        "algorithm.optimizer.*",
        "algorithm.enable_router_replay",
    ),
)

TRINITY = Framework("trinity", "Trinity-RFT 0.6", _RULES, _DEFAULTS)
