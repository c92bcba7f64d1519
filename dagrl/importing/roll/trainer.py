"""ROLL's ``actor_train`` and ``critic``: the trained engines."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, PARALLEL, critic_model, library_field, put_critic, sequence_parallel
from dagrl.importing.parts import is_known, put_critic_nodes
from dagrl.importing.roll.common import CRITIC, REFERENCE, STRATEGY, TRAIN, uses_critic
from dagrl.importing.table import Translation, joint, to, under

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


RULES = (
    joint(_trainer, *(f"{role}.strategy_args.strategy_name" for role in (TRAIN, REFERENCE, CRITIC)), always=True),
    joint(_critic, "reward_pretrain value_clip critic_warmup", always=True),
    joint(_strategy, *(f"{role}.{STRATEGY}{rest}" for role in (TRAIN, REFERENCE, CRITIC) for rest in ("", ".*"))),
)
MODEL = (
    to("pretrain", "model.path"),
    joint(_lora, under(TRAIN, "model_args.lora_*")),
)
