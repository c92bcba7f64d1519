"""ROLL's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.config.errors import counted
from dagrl.importing import engines, parts
from dagrl.importing.roll.common import (
    CRITIC,
    INFER,
    REFERENCE,
    STRATEGY,
    TRAIN,
    data_parallel_ranks,
    devices_of,
    uses_critic,
)
from dagrl.importing.table import Translation, implied, joint, to, under

_ROLES = {TRAIN: "actor", CRITIC: "critic"}


@joint(*(f"{role}.device_mapping" for role in (TRAIN, INFER, REFERENCE, CRITIC)), always=True)
def _groups(t: Translation) -> None:
    train, infer = devices_of(t, TRAIN), devices_of(t, INFER)
    machine = int(t.number("num_gpus_per_node", 8))

    def sizes(gpus: set[int]) -> tuple[int, int]:
        count = max(1, len(gpus))
        return (1, count) if count <= machine else (-(-count // machine), machine)

    keys = [f"{role}.device_mapping" for role in (TRAIN, INFER)]
    shared = bool(train & infer)
    groups = {"gpus": train | infer} if shared else {"train": train, "rollout": infer}
    parts.put_groups(t, {name: sizes(gpus) for name, gpus in groups.items()})
    for (name, gpus), key in zip(groups.items(), keys, strict=False):
        note = counted(len(gpus), "GPU")
        t.write(f"groups.{name}.gpus_per_node", sizes(gpus)[1], *(keys if shared else (key,)), note=note)
    if shared and train != infer:
        t.refuse("lists that overlap in part have no counterpart: one group holds the GPUs of both", *keys)
    home, *others = groups
    t.put("engines.actor.group", home)
    t.put("engines.generator.group", others[0] if others else home)
    if uses_critic(t):
        t.put("engines.critic.group", home)
    for role in (REFERENCE, CRITIC):
        if devices_of(t, role) != train and (role == REFERENCE or uses_critic(t)):
            t.refuse("is on the actor's GPUs here", f"{role}.device_mapping")


CLUSTER = (_groups, implied("machines of a group have the GPUs that it says", "num_gpus_per_node"))


@joint(*(f"{role}.strategy_args.strategy_name" for role in _ROLES), always=True)
def _trainer(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    for role in _ROLES if uses_critic(t) else (TRAIN,):
        key = f"{role}.strategy_args.strategy_name"
        if t.get(key) == "megatron_train":
            t.write(f"engines.{_ROLES[role]}.backend", "megatron", key)
        else:
            t.refuse("trainers are Megatron-core, split by `engines.NAME.parallel`; see `dagrl plan --search`", key)


@joint("reward_pretrain value_clip critic_warmup", always=True)
def _critic(t: Translation) -> None:
    if not uses_critic(t):
        return
    engines.put_critic(t)
    engines.critic_model(t, "reward_pretrain", "pretrain")
    t.write("nodes.critic.cliprange_value", t.number("value_clip") or 0, "value_clip")
    t.copy("critic_warmup", "nodes.update.critic_warmup", above=0)


_TABLES = {
    **dict.fromkeys(
        ("use_distributed_optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer"), "optimizer"
    ),
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), "ddp"),
}
"""Megatron's fields outside of the transformer's config."""


@joint(*(f"{role}.{STRATEGY}{rest}" for role in _ROLES for rest in ("", ".*")))
def _strategy(t: Translation) -> None:
    """Megatron's fields, by their own names: layout, transformer, optimizer and data parallelism."""
    for role, engine in _ROLES.items():
        section = f"{role}.{STRATEGY}"
        keys = t.below(section)
        if engine == "critic" and not uses_critic(t):
            continue
        if t.get(f"{role}.strategy_args.strategy_name") not in ("megatron_train", "megatron_infer"):
            t.refuse("belongs to another trainer than Megatron-core", *keys)
            continue
        engines.write_layout(t, engine, section)
        for key in keys:
            field = key.removeprefix(f"{section}.")
            if field not in (*engines.PARALLEL, "sequence_parallel", "bf16", "use_flash_attn", "use_remove_padding"):
                engines.library_field(t, key, engine, _TABLES.get(field, "transformer"), field)
    section, target = f"{TRAIN}.{STRATEGY}", "engines.actor.transformer"
    if t.get(f"{section}.recompute_granularity") == "full" and not t.given(f"{section}.recompute_method"):
        note = "Megatron's `full` needs it; ROLL's own recomputes every layer"
        for field, value in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
            t.write(f"{target}.{field}", value, f"{section}.recompute_granularity", note=note)


@joint(under(TRAIN, "model_args.lora_*"))
def _lora(t: Translation) -> None:
    prefix = f"{TRAIN}.model_args.lora_"
    if not t.number(f"{prefix}rank", 0):
        return
    for name in ("rank", "alpha", "dropout"):
        t.copy(f"{prefix}{name}", f"engines.actor.lora.{name}")
    if t.get(f"{prefix}target") not in (None, "all", "all-linear"):
        t.refuse("name layers in Megatron's names: `lora.target_modules`", f"{prefix}target")


TRAINER = (
    _trainer,
    _critic,
    _strategy,
    implied(
        "the reference is a frozen copy of the actor, in its layout",
        under(f"{REFERENCE}.strategy_args", "strategy_name strategy_config strategy_config.*"),
    ),
)
TRAINER_MODEL = (to("pretrain", "model.path"), _lora)


_TRAINING = "learning_rate weight_decay warmup_steps warmup_ratio lr_scheduler_type"
_DEFAULT_RATE = 5.0e-5
"""Learning rate of transformers' TrainingArguments, which ROLL's derive from."""


@joint("max_grad_norm", *(under(f"{role}.training_args", _TRAINING) for role in _ROLES), always=True)
def optimizer(t: Translation) -> None:
    for role in _ROLES if uses_critic(t) else (TRAIN,):
        args, engine = f"{role}.training_args", _ROLES[role]
        optimizer = f"engines.{engine}.optimizer"
        t.copy(f"{args}.learning_rate", f"{optimizer}.lr", _DEFAULT_RATE)
        t.copy(f"{args}.weight_decay", f"{optimizer}.weight_decay")
        t.copy("max_grad_norm", f"{optimizer}.clip_grad")
        engines.write_shape(t, engine, f"{args}.lr_scheduler_type", "linear")
        engines.write_steps(t, engine, "lr_warmup_steps", f"{args}.warmup_steps", optimizer_steps(t))
        if not t.number(f"{args}.warmup_steps", 0):
            engines.write_warmup_ratio(t, engine, f"{args}.warmup_ratio")


@joint(under(f"{TRAIN}.training_args", "per_device_train_batch_size gradient_accumulation_steps"))
def _mini_batch(t: Translation) -> None:
    """Samples of an optimizer step: rows of a GPU x accumulation x data-parallel ranks; divided by ``n``, prompts."""
    rows, accumulation = (
        f"{TRAIN}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, prompts = t.number("num_return_sequences_in_group", 1), t.number("rollout_batch_size", 128)
    ranks = data_parallel_ranks(t)
    samples = t.number(rows, 1) * t.number(accumulation, 1) * ranks
    if samples >= prompts * n:
        t.imply("one optimizer step a batch", rows, accumulation)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", rows, accumulation)
    else:
        note = f"{samples} samples on {ranks} data-parallel ranks / {n} of each prompt"
        t.write("nodes.update.mini_batch", samples // n, rows, accumulation, note=note)


def optimizer_steps(t: Translation) -> int:
    mini = t.tree.get("nodes.update.mini_batch")
    return -(-int(t.number("rollout_batch_size", 128)) // mini) if isinstance(mini, int) else 1


_PACKED = "max_tokens_per_microbatch_in_{} sequence_packing_args.max_packed_sequence_length_{}"


@joint(
    *(
        under(role, "max_tokens_per_microbatch_in_* sequence_packing_args.* use_dynamic_batching_in_*")
        for role in (TRAIN, REFERENCE, CRITIC, INFER)
    ),
)
def _tokens(t: Translation) -> None:
    """Micro-batches are packed; a GPU's rows bound them if ROLL pads."""
    for role, node, kinds in (
        (TRAIN, "update", ("train", "train")),
        (CRITIC, "critic", ("train", "train")),
        (TRAIN, "old", ("infer", "forward")),
        (REFERENCE, "ref", ("infer", "forward")),
    ):
        keys = under(role, _PACKED.format(*kinds)).split()
        key = next((key for key in keys if t.number(key)), None)
        if key and f"nodes.{node}.op" in t.tree:
            t.copy(key, f"nodes.{node}.tokens_per_micro_batch")
    t.imply("rows are always packed by `tokens_per_micro_batch`", *t.rest())


BATCHES = (_mini_batch, to("ppo_epochs", "nodes.update.epochs"))
BATCHES_TOKENS = (
    _tokens,
    implied(
        "rows are always packed by `tokens_per_micro_batch`",
        *(
            under(role, "use_sequence_packing sequence_length_round_in_* infer_batch_size")
            for role in (TRAIN, REFERENCE, CRITIC, INFER)
        ),
    ),
)
