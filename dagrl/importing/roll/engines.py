"""ROLL's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

from dagrl.config.errors import counted
from dagrl.importing.engines import (
    NO_CRITIC,
    PARALLEL,
    critic_model,
    library_field,
    put_critic,
    sequence_parallel,
    write_shape,
    write_steps,
    write_warmup_ratio,
)
from dagrl.importing.parts import is_known, put_critic_nodes, put_groups
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
from dagrl.importing.table import Translation, joint, to, under


def _groups(t: Translation) -> None:
    train, infer = devices_of(t, TRAIN), devices_of(t, INFER)
    machine = int(t.number("num_gpus_per_node", 8))

    def sizes(gpus: set[int]) -> tuple[int, int]:
        count = max(1, len(gpus))
        return (1, count) if count <= machine else (-(-count // machine), machine)

    keys = [f"{role}.device_mapping" for role in (TRAIN, INFER)]
    shared = bool(train & infer)
    groups = {"gpus": train | infer} if shared else {"train": train, "rollout": infer}
    put_groups(t, {name: sizes(gpus) for name, gpus in groups.items()})
    for (name, gpus), key in zip(groups.items(), keys, strict=False):
        note = counted(len(gpus), "GPU")
        t.write(f"groups.{name}.gpus_per_node", sizes(gpus)[1], *(keys if shared else (key,)), note=note)
    if shared and train != infer:
        t.refuse("lists that overlap in part have no counterpart: one group holds the GPUs of both", *keys)
    home = next(iter(groups))
    t.put("engines.actor.group", home)
    t.put("engines.generator.group", "gpus" if shared else "rollout")
    if uses_critic(t):
        t.put("engines.critic.group", home)
    for role in (REFERENCE, CRITIC):
        key = f"{role}.device_mapping"
        if devices_of(t, role) == train or (role == CRITIC and not uses_critic(t)):
            t.imply("is on the actor's GPUs", key)
        else:
            t.refuse("is on the actor's GPUs here", key)
    t.imply("machines of a group have the GPUs that it says", "num_gpus_per_node")


CLUSTER = (
    joint(
        _groups,
        "num_gpus_per_node",
        *(f"{role}.device_mapping" for role in (TRAIN, INFER, REFERENCE, CRITIC)),
        always=True,
    ),
)


_OPTIMIZER = ("use_distributed_optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer")
_DDP = ("overlap_grad_reduce", "overlap_param_gather")


def _trainer(t: Translation) -> None:
    t.put("engines.actor.backend", "megatron")
    for role, engine in ((TRAIN, "actor"), (CRITIC, "critic")):
        key = f"{role}.strategy_args.strategy_name"
        if role == CRITIC and not uses_critic(t):
            t.imply(NO_CRITIC, key)
        elif t.get(key) == "megatron_train":
            t.write(f"engines.{engine}.backend", "megatron", key)
        else:
            t.refuse("trainers are Megatron-core, split by `engines.NAME.parallel`; see `dagrl plan --search`", key)
    key = f"{REFERENCE}.strategy_args.strategy_name"
    t.imply("the reference is a frozen copy of the actor", key)


def _critic(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic(t)
    critic_model(t, "reward_pretrain", "pretrain")
    put_critic_nodes(t)
    clip = t.number("value_clip")
    t.write("nodes.critic.cliprange_value", clip if clip else 0, "value_clip")
    if t.number("critic_warmup", 0):
        t.write("nodes.update.critic_warmup", t.get("critic_warmup"), "critic_warmup")


def _strategy(t: Translation) -> None:
    """Megatron's fields, by their own names: layout, transformer, optimizer and data parallelism."""
    for key in t.current:
        role = key.split(".", 1)[0]
        engine = {TRAIN: "actor", CRITIC: "critic"}.get(role)
        field = key.removeprefix(f"{role}.{STRATEGY}").lstrip(".")
        megatron = t.get(f"{role}.strategy_args.strategy_name") in ("megatron_train", "megatron_infer")
        if engine == "critic" and not uses_critic(t):
            t.imply(NO_CRITIC, key)
        elif engine is None:
            t.imply("the reference is a frozen copy of the actor, in its layout", key)
        elif not megatron:
            t.refuse("belongs to another trainer than Megatron-core", key)
        elif not is_known(t.get(key)):
            t.imply("is null, as by default", key)
        elif field == "sequence_parallel":
            sequence_parallel(t, engine, key, f"{role}.{STRATEGY}.{PARALLEL[0]}")
        elif field in PARALLEL:
            if field.startswith("virtual") and t.get(key) == 1:
                t.imply("one chunk of layers, as by default", key)
            else:
                t.write(f"engines.{engine}.parallel.{field}", t.get(key), key)
        elif field in ("bf16", "use_flash_attn", "use_remove_padding"):
            t.imply("follows from the devices", key)
        else:
            table = "optimizer" if field in _OPTIMIZER else "ddp" if field in _DDP else "transformer"
            library_field(t, key, engine, table, field)
    prefix = f"{TRAIN}.{STRATEGY}"
    if t.get(f"{prefix}.recompute_granularity") == "full" and not t.given(f"{prefix}.recompute_method"):
        note = "Megatron's `full` needs it; ROLL's own recomputes every layer"
        for field, value in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
            t.write(f"engines.actor.transformer.{field}", value, f"{prefix}.recompute_granularity", note=note)


def _lora(t: Translation) -> None:
    prefix = f"{TRAIN}.model_args.lora_"
    if not t.number(f"{prefix}rank", 0):
        t.imply_all("there are no adapters")
        return
    for name in ("rank", "alpha", "dropout"):
        t.copy(f"{prefix}{name}", f"engines.actor.lora.{name}")
    target = f"{prefix}target"
    if t.get(target) in (None, "all", "all-linear"):
        t.imply("all linear layers, as by default", target)
    else:
        t.refuse("name layers in Megatron's names: `lora.target_modules`", target)


TRAINER = (
    joint(_trainer, *(f"{role}.strategy_args.strategy_name" for role in (TRAIN, REFERENCE, CRITIC)), always=True),
    joint(_critic, "reward_pretrain value_clip critic_warmup", always=True),
    joint(_strategy, *(f"{role}.{STRATEGY}{rest}" for role in (TRAIN, REFERENCE, CRITIC) for rest in ("", ".*"))),
)
TRAINER_MODEL = (
    to("pretrain", "model.path"),
    joint(_lora, under(TRAIN, "model_args.lora_*")),
)


_DEFAULT_RATE = 5.0e-5
"""Learning rate of transformers' TrainingArguments, which ROLL's derive from."""


def _learning_rate(t: Translation) -> None:
    for role, engine in ((TRAIN, "actor"), (CRITIC, "critic")):
        prefix = f"{role}.training_args"
        if engine == "critic" and not uses_critic(t):
            t.imply(NO_CRITIC, *(key for key in t.current if key.startswith(f"{CRITIC}.")))
            continue
        target = f"engines.{engine}.optimizer"
        rate = f"{prefix}.learning_rate"
        t.write(f"{target}.lr", _DEFAULT_RATE if t.get(rate) is None else t.get(rate), rate)
        t.copy(f"{prefix}.weight_decay", f"{target}.weight_decay")
        t.write(f"{target}.clip_grad", t.get("max_grad_norm"), "max_grad_norm")
        write_shape(t, engine, f"{prefix}.lr_scheduler_type", "linear")
        write_steps(t, engine, "lr_warmup_steps", f"{prefix}.warmup_steps", optimizer_steps(t))
        if t.number(f"{prefix}.warmup_steps", 0):
            t.imply("`warmup_steps` counts alone", f"{prefix}.warmup_ratio")
        else:
            write_warmup_ratio(t, engine, f"{prefix}.warmup_ratio")


OPTIMIZER = (
    joint(
        _learning_rate,
        "max_grad_norm",
        *(
            f"{role}.training_args.{name}"
            for role in (TRAIN, CRITIC)
            for name in ("learning_rate", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type")
        ),
        always=True,
    ),
)


def _mini_batch(t: Translation) -> None:
    """Samples of an optimizer step: rows of a GPU x accumulation x data-parallel ranks; divided by ``n``, prompts."""
    rows, accumulation = (
        f"{TRAIN}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, prompts = t.number("num_return_sequences_in_group", 1), t.number("rollout_batch_size", 128)
    ranks = data_parallel_ranks(t)
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


def optimizer_steps(t: Translation) -> int:
    """Return the optimizer steps of a step."""
    mini = t.tree.get("nodes.update.mini_batch")
    return -(-int(t.number("rollout_batch_size", 128)) // mini) if isinstance(mini, int) else 1


def _tokens(t: Translation) -> None:
    """Micro-batches are packed; rows of a GPU bound them where ROLL pads."""
    for role, node in ((TRAIN, "update"), (CRITIC, "critic")):
        if f"nodes.{node}.op" not in t.tree:
            continue
        packed = [
            f"{role}.max_tokens_per_microbatch_in_train",
            f"{role}.sequence_packing_args.max_packed_sequence_length_train",
        ]
        key = next((option for option in packed if t.number(option)), None)
        if key:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    for role, node in ((TRAIN, "old"), (REFERENCE, "ref")):
        packed = [
            f"{role}.max_tokens_per_microbatch_in_infer",
            f"{role}.sequence_packing_args.max_packed_sequence_length_forward",
        ]
        key = next((option for option in packed if t.number(option)), None)
        if key and f"nodes.{node}.op" in t.tree:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    t.imply("rows are always packed by `tokens_per_micro_batch`", *(key for key in t.current if not t.is_recorded(key)))


BATCHES = (
    joint(
        _mini_batch, under(TRAIN, "training_args.per_device_train_batch_size training_args.gradient_accumulation_steps")
    ),
    to("ppo_epochs", "nodes.update.epochs"),
)
BATCHES_TOKENS = (
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
    ),
)
