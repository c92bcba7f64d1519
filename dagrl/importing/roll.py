"""ROLL: the YAML of an RLVR pipeline."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Any

from dagrl.importing.parts import (
    data_file,
    generator,
    is_known,
    library_field,
    name_of,
    put_generator,
    put_groups,
    put_logprob,
    put_reference,
    server_key,
    trackers,
)
from dagrl.importing.table import Framework, Translation, implied, joint, refused, refused_unless, to
from dagrl.importing.verl.actor import PARALLEL

_DEFAULTS: dict[str, Any] = {
    "exp_name": "roll",
    "num_gpus_per_node": 8,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "num_return_sequences_in_group": 1,
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "track_with": "tensorboard",
    "adv_estimator": "gae",
    "gamma": 1,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "kl_penalty": "kl",
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "kl_loss_coef": 0,
    "entropy_loss_coef": 0,
    "loss_agg_mode": "seq-mean-token-mean",
    "max_grad_norm": 1.0,
    "train_infer_correction.is_weight.upper_bound": 1.2,
    "train_infer_correction.is_weight.weight_type": "token",
}
TRAIN, INFER, REFERENCE, CRITIC = "actor_train", "actor_infer", "reference", "critic"
_STRATEGY = "strategy_args.strategy_config"
_OPTIMIZER = ("use_distributed_optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer")
_DDP = ("overlap_grad_reduce", "overlap_param_gather")
_REWARDS = {"MathRuleRewardWorker": "math", "CodeSandboxRewardWorker": "code"}
_KL = {"kl": "k1", "abs": "abs", "mse": "k2"}


def devices(value: Any) -> list[int] | None:
    """The GPUs of a ``device_mapping``: a list, or a text such as ``list(range(0,8)) + [12]``, not evaluated."""
    if isinstance(value, list):
        return [int(each) for each in value] if all(isinstance(each, int) for each in value) else None
    found: list[int] = []
    for part in str(value).split("+"):
        ranged = re.fullmatch(r"\s*list\(range\((\d{1,6}),?\s*(\d{1,6})?(?:,\s*(\d{1,6}))?\)\)\s*", part)
        listed = re.fullmatch(r"\s*\[([\d,\s]*)\]\s*", part)
        if ranged:
            first, last, step = ranged[1], ranged[2], ranged[3]
            found += range(int(first), int(last), int(step or 1)) if last else range(int(first))
        elif listed:
            found += [int(each) for each in listed[1].split(",") if each.strip()]
        else:
            return None
    return found


def _devices_of(t: Translation, role: str) -> set[int]:
    return set(devices(t.get(f"{role}.device_mapping")) or ())


def _uses_critic(t: Translation) -> bool:
    return t.get("adv_estimator") == "gae"


def _groups(t: Translation) -> None:
    train, infer = _devices_of(t, TRAIN), _devices_of(t, INFER)
    machine = int(t.number("num_gpus_per_node", 8))

    def sizes(gpus: set[int]) -> tuple[int, int]:
        count = max(1, len(gpus))
        return (1, count) if count <= machine else (-(-count // machine), machine)

    keys = [f"{role}.device_mapping" for role in (TRAIN, INFER)]
    shared = bool(train & infer)
    groups = {"gpus": train | infer} if shared else {"train": train, "rollout": infer}
    put_groups(t, {name: sizes(gpus) for name, gpus in groups.items()})
    for (name, gpus), key in zip(groups.items(), keys, strict=False):
        note = f"{len(gpus)} GPUs"
        t.write(f"groups.{name}.gpus_per_node", sizes(gpus)[1], *(keys if shared else (key,)), note=note)
    if shared and train != infer:
        t.refuse("lists that overlap in part have no counterpart: one group holds the GPUs of both", *keys)
    home = next(iter(groups))
    t.put("engines.actor.group", home)
    t.put("engines.generator.group", "gpus" if shared else "rollout")
    if _uses_critic(t):
        t.put("engines.critic.group", home)
    for role in (REFERENCE, CRITIC):
        key = f"{role}.device_mapping"
        if _devices_of(t, role) == train or (role == CRITIC and not _uses_critic(t)):
            t.imply("is on the actor's GPUs", key)
        else:
            t.refuse("is on the actor's GPUs here", key)
    t.imply("machines of a group have the GPUs that it says", "num_gpus_per_node")


def _lengths(t: Translation) -> None:
    t.write("data.max_prompt_tokens", t.get("prompt_length"), "prompt_length")
    response, sequence = t.number("response_length"), t.number("sequence_length")
    if response:
        t.write("nodes.rollout.sampling.max_new_tokens", response, "response_length")
        t.imply("follows from prompt and response", "sequence_length")
    elif sequence:
        note = "less the prompt"
        t.write(
            "nodes.rollout.sampling.max_new_tokens", sequence - t.number("prompt_length"), "sequence_length", note=note
        )
    t.imply(
        "has no effect: the response's length follows from `sequence_length`", f"{INFER}.generating_args.max_new_tokens"
    )


def _data(t: Translation) -> None:
    for key, target in ((f"{TRAIN}.data_args.file_name", "data.train"), ("validation.data_args.file_name", "data.val")):
        value = t.get(key)
        files = value if isinstance(value, list) else [value] if value is not None else []
        if len(files) == 1:
            t.write(target, data_file(files[0]), key, note="convert it once (docs/data.md)")
        elif files and target == "data.val":
            for index, file in enumerate(files):
                label = re.sub(r"\W", "_", PurePosixPath(str(file)).stem.lower())
                label = label if label[:1].isalpha() else f"set_{index}"
                t.write(f"data.val.{label}", data_file(file), key, note="convert them once (docs/data.md)")
        elif files:
            t.put(target, data_file(files[0]))
            t.note(key, target, f"one file here: merge the {len(files)} files; the first one stands in")


def _sampling(t: Translation, prefix: str, target: str) -> None:
    for name in ("temperature", "top_p", "top_k"):
        key = f"{prefix}.{name}"
        if t.given(key):
            t.write(f"{target}.{name}", t.get(key), key)


def _rollout(t: Translation) -> None:
    t.put("nodes.rollout.op", "rollout")
    t.put("nodes.rollout.engine", "generator")
    prefix = f"{INFER}.generating_args"
    _sampling(t, prefix, "nodes.rollout.sampling")
    t.imply("is `num_return_sequences_in_group`", f"{prefix}.num_return_sequences")
    over = "max_additional_running_prompts"
    if t.flag("is_use_additional_prompts") and t.number(over):
        prompts = t.get("rollout_batch_size") + t.get(over)
        t.write(
            "nodes.rollout.over_sampling_batch_size",
            prompts,
            "rollout_batch_size",
            over,
            note="prompts and those beyond",
        )
        t.imply("`over_sampling_batch_size` switches it on", "is_use_additional_prompts")
    else:
        t.imply("no more prompts are begun than a step needs", "is_use_additional_prompts", over)


def _validation(t: Translation) -> None:
    """ROLL validates every ``eval_steps``, and before the first step."""
    if not any(key == "data.val" or key.startswith("data.val.") for key in t.tree):
        t.imply_all("there is no validation without a file")
        return
    t.write("run.validate_every", t.get("eval_steps"), "eval_steps")
    t.write("run.validate_first", True, "validation", note="ROLL validates before the first step")
    prefix = "validation.generating_args"
    if any(key.startswith(f"{prefix}.") for key in t.current):
        _sampling(t, prefix, "nodes.rollout.val_sampling")
        t.put("nodes.rollout.val_sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
        count = f"{prefix}.num_return_sequences"
        if t.number(count, 1) > 1:
            t.write("nodes.rollout.val_n", t.get(count), count)
        else:
            t.imply("one response, as by default", count)
    t.imply("follows from the rollout", f"{prefix}.max_new_tokens", f"{prefix}.num_beams")


def _trainer(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    for role, engine in ((TRAIN, "actor"), (CRITIC, "critic")):
        key = f"{role}.strategy_args.strategy_name"
        if role == CRITIC and not _uses_critic(t):
            t.imply("there is no critic with this estimator", key)
        elif t.get(key) == "megatron_train":
            t.write(f"engines.{engine}.backend", "megatron", key)
        else:
            t.refuse("trainers are Megatron-core, split by `engines.NAME.parallel`; see `dagrl plan --search`", key)
    key = f"{REFERENCE}.strategy_args.strategy_name"
    t.imply("the reference is a frozen copy of the actor", key)


def _strategy(t: Translation) -> None:
    """Megatron's fields, by their own names: layout, transformer, optimizer and data parallelism."""
    for key in t.current:
        role = key.split(".", 1)[0]
        engine = {TRAIN: "actor", CRITIC: "critic"}.get(role)
        field = key.removeprefix(f"{role}.{_STRATEGY}").lstrip(".")
        megatron = t.get(f"{role}.strategy_args.strategy_name") in ("megatron_train", "megatron_infer")
        if engine == "critic" and not _uses_critic(t):
            t.imply("there is no critic with this estimator", key)
        elif engine is None:
            t.imply("the reference is a frozen copy of the actor, in its layout", key)
        elif not megatron:
            t.refuse("belongs to another trainer than Megatron-core", key)
        elif not is_known(t.get(key)):
            t.imply("is null, as by default", key)
        elif field in PARALLEL or field == "sequence_parallel":
            if field.startswith("virtual") and t.get(key) == 1:
                t.imply("one chunk of layers, as by default", key)
            else:
                t.write(f"engines.{engine}.parallel.{field}", t.get(key), key)
        elif field in ("bf16", "use_flash_attn", "use_remove_padding"):
            t.imply("follows from the devices", key)
        else:
            table = "optimizer" if field in _OPTIMIZER else "ddp" if field in _DDP else "transformer"
            library_field(t, key, engine, table, field)
    prefix = f"{TRAIN}.{_STRATEGY}"
    if t.get(f"{prefix}.recompute_granularity") == "full" and not t.given(f"{prefix}.recompute_method"):
        note = "Megatron's `full` needs it; ROLL's own recomputes every layer"
        for field, value in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
            t.write(f"engines.actor.transformer.{field}", value, f"{prefix}.recompute_granularity", note=note)


def _server(t: Translation) -> None:
    key = f"{INFER}.strategy_args.strategy_name"
    name = t.get(key)
    if name in ("vllm", "sglang"):
        generator(t, name, key)
    else:
        put_generator(t, "sglang")
        t.refuse("generators are SGLang, vLLM and, for small models, transformers; sglang stands in", key)
    workers = f"{INFER}.num_gpus_per_worker"
    if t.number(workers, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(workers), workers)
    else:
        t.imply("one GPU a server, or as the server's own size says", workers)
    for each in t.current:
        field = each.removeprefix(f"{INFER}.{_STRATEGY}").lstrip(".")
        if each.startswith(f"{INFER}.{_STRATEGY}"):
            if field in ("load_format", ""):
                t.imply("weights come from the weight sync", each)
            else:
                library_field(t, each, "generator", "server", field)


def _mini_batch(t: Translation) -> None:
    """Samples of an optimizer step: rows of a GPU x accumulation x data-parallel ranks; divided by ``n``, prompts."""
    rows, accumulation = (
        f"{TRAIN}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, prompts = t.number("num_return_sequences_in_group", 1), t.number("rollout_batch_size", 128)
    sizes = [t.number(f"{TRAIN}.{_STRATEGY}.{name}", 1) for name in (PARALLEL[0], PARALLEL[1], PARALLEL[3])]
    ranks = max(1, len(_devices_of(t, TRAIN))) // math.prod(sizes) or 1
    samples = t.number(rows, 1) * t.number(accumulation, 1) * ranks
    if not t.given(rows) and not t.given(accumulation):
        return
    if samples >= prompts * n:
        t.imply("one optimizer step a batch", rows, accumulation)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", rows, accumulation)
    else:
        note = f"{samples} samples on {ranks} data-parallel ranks / {n} of each prompt"
        t.write("nodes.update.mini_batch", samples // n, rows, accumulation, note=note)


def _learning_rate(t: Translation) -> None:
    for role, engine in ((TRAIN, "actor"), (CRITIC, "critic")):
        prefix = f"{role}.training_args"
        if engine == "critic" and not _uses_critic(t):
            t.imply(
                "there is no critic with this estimator", *(key for key in t.current if key.startswith(f"{CRITIC}."))
            )
            continue
        target = f"engines.{engine}.optimizer"
        for name, field in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
            if t.given(f"{prefix}.{name}"):
                t.write(f"{target}.{field}", t.get(f"{prefix}.{name}"), f"{prefix}.{name}")
        t.write(f"{target}.clip_grad", t.get("max_grad_norm"), "max_grad_norm")
        schedule = f"engines.{engine}.lr_schedule"
        style = f"{prefix}.lr_scheduler_type"
        if t.get(style, "linear") in ("constant", "linear", "cosine"):
            t.write(
                f"{schedule}.lr_decay_style",
                t.get(style, "linear"),
                style,
                note="" if t.given(style) else "default of ROLL",
            )
        else:
            t.refuse("shapes are constant, linear, cosine and inverse-square-root", style)
        warmup = f"{prefix}.warmup_steps"
        if t.number(warmup, 0):
            each = _optimizer_steps(t)
            note = f"optimizer steps there, {each} a step" if each > 1 else ""
            t.write(f"{schedule}.lr_warmup_steps", -(-int(t.get(warmup)) // each), warmup, note=note)


def _optimizer_steps(t: Translation) -> int:
    mini = t.tree.get("nodes.update.mini_batch")
    return -(-int(t.number("rollout_batch_size", 128)) // mini) if isinstance(mini, int) else 1


def _estimator(t: Translation) -> None:
    """``reinforce`` with whitening is REINFORCE++; with means of groups it is its baseline form, or Dr. GRPO."""
    key, whiten, mean, std = "adv_estimator", "whiten_advantages", "norm_mean_type", "norm_std_type"
    name, whitened, grouped = t.get(key), t.flag(whiten), t.get(mean) == "group"
    t.put("nodes.advantage.op", "advantage")
    target = "nodes.advantage.estimator"
    if name == "gae":
        t.write(target, "gae", key)
        for option, field in (("gamma", "gamma"), ("lambd", "lam")):
            t.write(f"nodes.advantage.{field}", t.get(option), option)
        t.imply("advantages of gae are always whitened", whiten)
    elif name == "grpo":
        t.write(target, "grpo", key)
        if whitened:
            t.refuse("advantages of grpo are not whitened: an estimator of your own (docs/your_own.md)", whiten)
        t.imply("is grpo's own", mean, std)
    elif name == "reinforce" and (whitened or grouped) and t.get(std) in (None, "null"):
        form = ("reinforce_plus_plus_baseline" if grouped else "reinforce_plus_plus") if whitened else "dr_grpo"
        t.write(target, form, *(each for each in (key, whiten, mean) if t.given(each) and t.get(each) is not None))
        t.imply("nothing is divided by a deviation of rewards", std)
    elif name == "reinforce" and grouped and t.get(std) == "group" and not whitened:
        t.write(target, "grpo", key, mean, std)
    else:
        t.put(target, "reinforce_plus_plus")
        t.refuse("has no counterpart: an estimator of your own (docs/your_own.md); reinforce_plus_plus stands in", key)
        t.refuse("has no counterpart with this estimator", *(each for each in (mean, std) if t.get(each) is not None))
    t.imply("is null or off, as by default", *(each for each in (whiten, mean, std) if t.get(each) in (None, False)))
    rest = [each for each in ("gamma", "lambd", whiten, mean, std) if t.given(each) and not t.is_recorded(each)]
    t.imply("has no effect on this estimator", *rest)


def _loss(t: Translation) -> None:
    t.put("nodes.update.op", "update")
    t.put("nodes.update.engine", "actor")
    clip = "pg_clip"
    if t.flag("use_pg_clip_range"):
        t.write("nodes.update.loss.clip_ratio", t.get("pg_clip_low"), "pg_clip_low", "use_pg_clip_range")
        t.write("nodes.update.loss.clip_ratio_high", t.get("pg_clip_high"), "pg_clip_high")
    else:
        t.write("nodes.update.loss.clip_ratio", t.get(clip), clip)
    if t.flag("dual_clip_loss"):
        bound = float(f"{1 + 2 * t.number(clip, 0.2):.12g}")
        t.write("nodes.update.loss.dual_clip", bound, "dual_clip_loss", note="1 + 2 pg_clip")
    if t.get("importance_sampling") == "seq":
        t.write("nodes.update.loss.policy", "gspo", "importance_sampling")
    variant = f"{TRAIN}.pg_variant"
    policies = {"ppo": "ppo_clip", "vanilla": "reinforce", "topr": "topr", "cispo": "cispo", "kimi15": "opmd_kimi"}
    if t.get(variant) in policies:
        t.write("nodes.update.loss.policy", policies[t.get(variant)], variant)
    else:
        t.refuse("losses with a counterpart are ppo, vanilla, topr, cispo and kimi15", variant)
    t.write("nodes.update.loss.entropy_coef", t.get("entropy_loss_coef"), "entropy_loss_coef")
    mode = t.get("loss_agg_mode")
    t.write("nodes.update.loss.aggregation", mode, "loss_agg_mode")


def _divergence(t: Translation) -> None:
    if t.flag("use_kl_loss"):
        t.write("nodes.update.loss.kl_coef", t.get("kl_loss_coef"), "kl_loss_coef", "use_kl_loss")
        t.write("nodes.update.loss.kl_estimator", "k3", "use_kl_loss")
    else:
        t.imply("there is no divergence in the loss", "use_kl_loss", "kl_loss_coef")
    keys = ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
    if t.flag("add_token_level_kl"):
        target = "nodes.advantage.kl_in_reward"
        t.write(f"{target}.coef", t.get("init_kl_coef"), "init_kl_coef", "add_token_level_kl")
        if t.get("kl_penalty") in _KL:
            t.write(f"{target}.estimator", _KL[t.get("kl_penalty")], "kl_penalty")
        else:
            t.refuse("estimators in the reward are k1, k2, k3 and abs", "kl_penalty")
        if t.number("target_kl"):
            t.write(f"{target}.target_kl", t.get("target_kl"), "target_kl")
            t.write(f"{target}.horizon", t.get("kl_horizon"), "kl_horizon")
    else:
        t.imply("there is no divergence in the reward", "add_token_level_kl", *keys)
    put_logprob(t, "old", "actor", "old_logprob")
    put_reference(t)


def _tokens(t: Translation) -> None:
    """Micro-batches are packed; rows of a GPU bound them where ROLL pads."""
    for role, node in ((TRAIN, "update"), (CRITIC, "critic")):
        if f"nodes.{node}.op" not in t.tree:
            continue
        packed = [
            f"{role}.max_tokens_per_microbatch_in_train",
            f"{role}.sequence_packing_args.max_packed_sequence_length_train",
        ]
        key = next((each for each in packed if t.number(each)), None)
        if key:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    for role, node in ((TRAIN, "old"), (REFERENCE, "ref")):
        packed = [
            f"{role}.max_tokens_per_microbatch_in_infer",
            f"{role}.sequence_packing_args.max_packed_sequence_length_forward",
        ]
        key = next((each for each in packed if t.number(each)), None)
        if key and f"nodes.{node}.op" in t.tree:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    t.imply("rows are always packed by `tokens_per_micro_batch`", *(key for key in t.current if not t.is_recorded(key)))


def _critic(t: Translation) -> None:
    if not _uses_critic(t):
        t.imply_all("there is no critic with this estimator")
        return
    t.put("engines.critic.backend", "megatron")
    t.put("engines.critic.head", "value")
    path = "reward_pretrain"
    if t.given(path) and t.get(path) != t.get("pretrain"):
        t.write("engines.critic.model.path", t.get(path), path)
    else:
        t.imply("the critic starts from the policy's weights", path)
    for node, op in (("values", "values"), ("critic", "critic")):
        t.put(f"nodes.{node}.op", op)
        t.put(f"nodes.{node}.engine", "critic")
    clip = t.number("value_clip")
    t.write("nodes.critic.cliprange_value", clip if clip else 0, "value_clip")
    if t.number("critic_warmup", 0):
        t.write("nodes.update.critic_warmup", t.get("critic_warmup"), "critic_warmup")


def _correction(t: Translation) -> None:
    prefix = "train_infer_correction"
    weight = f"{prefix}.is_weight"
    target = "nodes.update.rollout_correction"
    if t.flag(f"{weight}.enabled"):
        kind = f"{weight}.weight_type"
        if t.get(kind) in ("token", "sequence"):
            t.write(f"{target}.rollout_is", t.get(kind), kind, f"{weight}.enabled")
            t.write(f"{target}.rollout_is_threshold", t.get(f"{weight}.upper_bound"), f"{weight}.upper_bound")
        else:
            t.refuse("weights are of tokens or of sequences", kind, f"{weight}.enabled")
    first = f"{prefix}.filters.0"
    if t.flag(f"{first}.enabled"):
        levels = {"token": "token", "sequence": "sequence", "geometric": "geometric"}
        level = t.get(f"{first}.agg_type", "token")
        if level in levels and not t.flag(f"{first}.diff_enabled"):
            t.write(f"{target}.rollout_rs", levels[level], f"{first}.agg_type", f"{first}.enabled")
            t.write(f"{target}.rollout_rs_threshold", t.get(f"{first}.ratio_high", 1.2), f"{first}.ratio_high")
            t.write(f"{target}.rollout_rs_threshold_lower", t.get(f"{first}.ratio_low", 0.8), f"{first}.ratio_low")
        else:
            t.refuse(
                "responses are rejected by ratio alone, of tokens or responses",
                *(k for k in t.current if k.startswith(first)),
            )
    for key in t.current:
        if re.match(rf"{prefix}\.filters\.[1-9]", key):
            t.refuse("one criterion: `rollout_rs`", key)
    t.imply("is off, or has no effect", *(key for key in t.current if not t.is_recorded(key)))


def _reward(t: Translation) -> None:
    names = list(dict.fromkeys(key.split(".")[1] for key in t.current if key.startswith("rewards.")))
    t.put("nodes.reward.op", "reward")
    workers = {name: str(t.get(f"rewards.{name}.worker_cls", "")).rpartition(".")[2] for name in names}
    known = [name for name in names if workers[name] in _REWARDS]
    chosen = known[0] if known else None
    if chosen:
        t.write("nodes.reward.fn", _REWARDS[workers[chosen]], f"rewards.{chosen}.worker_cls")
    else:
        t.put("nodes.reward.fn", "math")
        key = f"rewards.{names[0]}.worker_cls" if names else "rewards"
        t.note(key, "nodes.reward.fn", "set `fn`, or a node {op: judge} (docs/rewards.md); math stands in")
    for name in names:
        own = [key for key in t.current if key.startswith(f"rewards.{name}.") and not t.is_recorded(key)]
        if name == chosen:
            _query_filter(t, f"rewards.{name}.query_filter_config")
            t.imply("rewards are computed on the host, of all rows", *(key for key in own if not t.is_recorded(key)))
        else:
            several = "rewards of several domains are one function of your own, by `data_source` (docs/rewards.md)"
            t.refuse(several if len(names) > 1 else "a judge is a node {op: judge} (docs/rewards.md)", *own)


def _query_filter(t: Translation, prefix: str) -> None:
    kind = f"{prefix}.type"
    if t.get(kind) == "mean_filter":
        t.write("nodes.keep.op", "filter", kind)
        for name, target in (("threshold_down", "lower"), ("threshold_up", "upper")):
            key = f"{prefix}.filter_args.{name}"
            if t.given(key):
                t.write(f"nodes.keep.{target}", t.get(key), key)
    elif t.get(kind) == "std_filter":
        t.write("nodes.keep.op", "filter", kind)
        key = f"{prefix}.filter_args.std_threshold"
        if t.given(key):
            t.write("nodes.keep.min_std", t.get(key), key)


def _ahead(t: Translation) -> None:
    ratio = t.number("async_generation_ratio", 0)
    if ratio:
        t.write("schedule.max_staleness", math.ceil(ratio), "async_generation_ratio", note="whole steps")
        t.put("engines.generator.weight_sync.pause", "in_place")
    else:
        t.imply("steps do not overlap, as by default", "async_generation_ratio")


def _lora(t: Translation) -> None:
    prefix = f"{TRAIN}.model_args.lora_"
    if not t.number(f"{prefix}rank", 0):
        t.imply_all("there are no adapters")
        return
    for name in ("rank", "alpha", "dropout"):
        if t.given(f"{prefix}{name}"):
            t.write(f"engines.actor.lora.{name}", t.get(f"{prefix}{name}"), f"{prefix}{name}")
    target = f"{prefix}target"
    if t.get(target) in (None, "all", "all-linear"):
        t.imply("all linear layers, as by default", target)
    else:
        t.refuse("name layers in Megatron's names: `lora.target_modules`", target)


def _name(t: Translation) -> None:
    t.write("name", name_of(t.get("exp_name")), "exp_name")


def _track(t: Translation) -> None:
    value = t.get("track_with")
    trackers(t, value if isinstance(value, list) else [value], "track_with")


def _keep(t: Translation) -> None:
    if t.number("max_ckpt_to_keep", 0):
        t.write("run.keep", t.get("max_ckpt_to_keep"), "max_ckpt_to_keep")
    else:
        t.refuse("some checkpoints are kept, not all: `run.keep`", "max_ckpt_to_keep")


_CRITICS = (TRAIN, CRITIC)
_RULES = (
    joint(_name, "exp_name", targets=("name",), always=True),
    joint(
        _groups,
        *(f"{role}.device_mapping" for role in (TRAIN, INFER, REFERENCE, CRITIC)),
        "num_gpus_per_node",
        targets=("groups",),
        always=True,
    ),
    to("pretrain", "model.path"),
    joint(
        _lengths,
        "prompt_length",
        "response_length",
        "sequence_length",
        f"{INFER}.generating_args.max_new_tokens",
        targets=("data.max_prompt_tokens", "nodes.rollout.sampling.max_new_tokens"),
        always=True,
    ),
    joint(
        _data,
        f"{TRAIN}.data_args.file_name",
        "validation.data_args.file_name",
        targets=("data.train", "data.val"),
        always=True,
    ),
    joint(
        _rollout,
        *(f"{INFER}.generating_args.{name}" for name in ("temperature", "top_p", "top_k", "num_return_sequences")),
        "is_use_additional_prompts",
        "max_additional_running_prompts",
        targets=("nodes.rollout.sampling", "nodes.rollout.over_sampling_batch_size"),
        always=True,
    ),
    to("rollout_batch_size", "data.prompts_per_step", write_default=True),
    to("num_return_sequences_in_group", "nodes.rollout.n", write_default=True),
    joint(
        _validation,
        "eval_steps",
        "validation.generating_args.*",
        targets=("run.validate_every", "nodes.rollout.val_sampling", "nodes.rollout.val_n"),
    ),
    joint(
        _trainer,
        *(f"{role}.strategy_args.strategy_name" for role in (TRAIN, REFERENCE, CRITIC)),
        targets=("engines.actor.backend",),
        always=True,
    ),
    joint(
        _critic,
        "reward_pretrain",
        "value_clip",
        "critic_warmup",
        targets=("engines.critic", "nodes.critic"),
        always=True,
    ),
    joint(
        _strategy,
        *(f"{role}.{_STRATEGY}{rest}" for role in (TRAIN, REFERENCE, CRITIC) for rest in ("", ".*")),
        targets=("engines.actor.parallel", "engines.actor.transformer", "engines.actor.optimizer", "engines.actor.ddp"),
    ),
    joint(
        _server,
        f"{INFER}.strategy_args.strategy_name",
        f"{INFER}.{_STRATEGY}*",
        f"{INFER}.num_gpus_per_worker",
        targets=("engines.generator.backend", "engines.generator.server"),
        always=True,
    ),
    joint(
        _mini_batch,
        f"{TRAIN}.training_args.per_device_train_batch_size",
        f"{TRAIN}.training_args.gradient_accumulation_steps",
        targets=("nodes.update.mini_batch",),
    ),
    to("ppo_epochs", "nodes.update.epochs"),
    joint(
        _learning_rate,
        *(
            f"{role}.training_args.{name}"
            for role in _CRITICS
            for name in ("learning_rate", "weight_decay", "warmup_steps", "lr_scheduler_type")
        ),
        "max_grad_norm",
        targets=("engines.actor.optimizer", "engines.actor.lr_schedule"),
        always=True,
    ),
    joint(
        _estimator,
        *("adv_estimator", "whiten_advantages", "norm_mean_type", "norm_std_type", "gamma", "lambd"),
        targets=("nodes.advantage.estimator", "nodes.advantage.lam", "nodes.advantage.gamma"),
        always=True,
    ),
    joint(
        _loss,
        *("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss", "importance_sampling"),
        *(f"{TRAIN}.pg_variant", "entropy_loss_coef", "loss_agg_mode"),
        targets=(
            *("nodes.update.loss.clip_ratio", "nodes.update.loss.clip_ratio_high", "nodes.update.loss.dual_clip"),
            *("nodes.update.loss.policy", "nodes.update.loss.entropy_coef", "nodes.update.loss.aggregation"),
        ),
        always=True,
    ),
    joint(
        _divergence,
        *("use_kl_loss", "kl_loss_coef", "add_token_level_kl", "init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"),
        targets=("nodes.update.loss.kl_coef", "nodes.advantage.kl_in_reward"),
        always=True,
    ),
    joint(
        _tokens,
        *(
            f"{role}.{name}"
            for role in (TRAIN, REFERENCE, CRITIC, INFER)
            for name in (
                *(
                    "max_tokens_per_microbatch_in_train",
                    "max_tokens_per_microbatch_in_infer",
                    "sequence_packing_args.*",
                ),
                *("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing"),
                *("sequence_length_round_in_train", "sequence_length_round_in_infer", "infer_batch_size"),
            )
        ),
        targets=("nodes.update.tokens_per_micro_batch",),
    ),
    joint(_correction, "train_infer_correction.*", targets=("nodes.update.rollout_correction.rollout_is",)),
    joint(_reward, "rewards.*", "rewards", targets=("nodes.reward.fn", "nodes.keep"), always=True),
    joint(_ahead, "async_generation_ratio", targets=("schedule.max_staleness",)),
    joint(_lora, f"{TRAIN}.model_args.lora_*", targets=("engines.actor.lora",)),
    to("seed", "run.seed"),
    to("max_steps", "run.steps", write_default=True),
    to("save_steps", "run.save_every", write_default=True),
    joint(_keep, "max_ckpt_to_keep", targets=("run.keep",)),
    joint(_track, "track_with", targets=("track",), always=True),
    to("rpc_timeout", "run.node_timeout_s", convert=float),
    refused(
        "rewards and advantages are not clipped: an estimator of your own (docs/your_own.md)",
        "reward_clip",
        "advantage_clip",
    ),
    refused_unless(
        False, "a mask of your own leaves them out (docs/migration.md)", "max_len_mask", "error_max_len_clip"
    ),
    refused_unless(
        False, "groups are replaced, never masked: `nodes.keep` with `lower` and `upper`", "difficulty_mask"
    ),
    refused_unless(
        (False, 0, 0.0, 1, 1.0, None),
        "has no counterpart in the loss",
        "difficulty_loss_weight",
        "length_loss_weight",
        "postive_loss_coef",
        "use_topr_neg_loss_coef",
        "use_topr_loss",
        "rl_loss_coef",
        "l2",
        "use_reward_scaling",
        "use_reward_norm",
        "whiten_rewards",
        "add_len_reward",
        "reward_shift",
        "reward_scale",
    ),
    refused_unless("PPO", "is a policy: `nodes.update.loss.policy: reinforce`", "use_policy_loss_type"),
    refused(
        "mix the rows of the file beforehand", "*.domain_interleave_probs*", "*.interleave_probs", "dataset_filter*"
    ),
    refused_unless(1, "samples are drawn, without beams", "*.num_beams"),
    refused_unless((None, 1), "the learning rate has a warm-up in steps", f"{TRAIN}.training_args.warmup_ratio"),
    refused(
        "environments and agents are classes of your own (docs/multi_turn.md)",
        "custom_envs*",
        "*env_manager*",
        "*_env_*",
        "env_*",
        "max_tokens_per_step",
        "max_actions_per_traj",
        "group_size",
        "reward_normalization*",
        "*.max_env_num_per_worker",
        "num_env_groups*",
        "tags",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", "profiler_*", "*profiler*"),
    refused(
        "there is no training of images' towers, distillation or other pipelines of ROLL",
        "student*",
        "teacher*",
        "*distill*",
        "opd*",
        "is_pure_opd",
    ),
    implied(
        "follows from the pipeline and the model",
        "*.model_args.*",
        "*.data_args.*",
        "*.training_args.*",
        "*.world_size",
        "*.worker_cls",
        "*.use_remove_padding",
        "*.offload_nccl",
        "*.backend_timeout",
        "*.model_update_frequency",
        "*.logits_in_fp32",
        "*.apply_loss_scale",
        "*.generating_args.*",
        "*.system_envs*",
        "*.name",
        "*.max_concurrency",
        "minibatch_data_iter_num",
        "global_template",
        "difficulty_low_threshold",
        "difficulty_high_threshold",
        "error_max_len_threshold",
        "val_*",
        "vlm_filter*",
        "mask_type",
        "balance_length",
        "enable_reference",
        "*old_logprobs_recompute",
        "model_update_buffer_size_mb",
        "model_download_type",
        "num_nodes",
        "reward_model*",
    ),
    implied("`sleep: auto` offloads while another engine of the group works", "is_offload_*", "offload_*"),
    implied(
        "is `dagrl run --run-dir DIR`",
        "output_dir",
        "logging_dir",
        "base_dir",
        "checkpoint_config*",
        "rollout_dump_dir",
        "resume_from_checkpoint",
        "save_logging_board_dir",
    ),
    refused("trackers read their own environment", "tracker_kwargs*"),
    implied(
        "belongs to the launch",
        "hydra*",
        "defaults*",
        "logging_steps",
        "system_envs*",
        "generate_opt_level",
        "is_num_return_sequences_expand",
        "max_running_requests",
        "user_defined_rollout_loop_cls",
        "local_rank",
        "report_length_and_rewards",
        "length_profiler_dir",
        "router_args*",
        "rollout_mock*",
        "deepspeed_zero*",
    ),
)

ROLL = Framework("roll", "ROLL", _RULES, _DEFAULTS)
