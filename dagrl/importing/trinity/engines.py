"""Trinity-RFT's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

import math

from dagrl.importing.engines import (
    FSDP,
    PARALLEL,
    RECOMPUTE,
    library_fields,
    put_critic,
    write_betas,
    write_shape,
    write_steps,
    write_warmup_ratio,
)
from dagrl.importing.parts import is_known, put_groups
from dagrl.importing.table import Translation, joint, to, under
from dagrl.importing.trinity.common import MODEL, interval_of, is_megatron, uses_critic


def _groups(t: Translation) -> None:
    """Explorer and trainer have GPUs of their own: the engines' first, the rest for the trainer."""
    nodes, gpus = t.number("cluster.node_num", 1), t.number("cluster.gpu_per_node", 8)
    number, tensor = f"{MODEL}.engine_num", f"{MODEL}.tensor_parallel_size"
    each = t.number(tensor, 1) * t.number(f"{MODEL}.data_parallel_size", 1)
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
    if uses_critic(t):
        t.put("engines.critic.group", t.tree["engines.actor.group"])
    t.put("engines.actor.backend", "megatron")


def _split(count: int, machine: int) -> tuple[int, int]:
    if count <= machine:
        return 1, count
    nodes = next(n for n in range(-(-count // machine), count + 1) if count % n == 0)
    return nodes, count // nodes


def _ahead(t: Translation) -> None:
    offset, style, syncs = "synchronizer.sync_offset", "synchronizer.sync_style", interval_of(t)
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


CLUSTER = (
    joint(_groups, "cluster.node_num cluster.gpu_per_node", under(MODEL, "engine_num"), always=True),
    joint(_ahead, "synchronizer.sync_offset synchronizer.sync_style synchronizer.sync_method"),
)


def _trainer(t: Translation) -> None:
    key = "trainer.trainer_strategy"
    if is_megatron(t):
        t.write("engines.actor.backend", "megatron", key)
    else:
        t.refuse(FSDP, key)
    engines = ("actor", "critic") if uses_critic(t) else ("actor",)
    if uses_critic(t):
        put_critic(t)
    for name in (*PARALLEL, "sequence_parallel"):
        size = f"trainer.megatron.{name}"
        if is_known(t.get(size)) and is_megatron(t):
            for engine in engines:
                if name == "sequence_parallel" and t.tree.get(f"engines.{engine}.parallel.{PARALLEL[0]}", 1) == 1:
                    t.imply("has no effect without tensor parallelism", size)
                else:
                    t.write(f"engines.{engine}.parallel.{name}", t.get(size), size)
    sequence = "trainer.ulysses_sequence_parallel_size"
    if not is_megatron(t):
        if t.number(sequence, 1) > 1:
            for engine in engines:
                t.write(f"engines.{engine}.parallel.context_parallel_size", t.get(sequence), sequence)
        for engine in engines:
            for name, value in RECOMPUTE.items():
                t.put(f"engines.{engine}.transformer.{name}", value)
    t.imply("is 1, as by default", sequence)


def _tokens(t: Translation) -> None:
    parallel = max(
        t.number("trainer.ulysses_sequence_parallel_size", 1), t.number("trainer.megatron.context_parallel_size", 1)
    )
    key = "trainer.max_token_len_per_gpu"
    if t.number(key):
        for node in ("update", "old", "ref", "values", "critic"):
            if f"nodes.{node}.op" in t.tree:
                t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key) * parallel, key)
    t.imply(
        "rows are always packed by `tokens_per_micro_batch`", "trainer.use_dynamic_bsz", "trainer.use_remove_padding"
    )


def _lora(t: Translation) -> None:
    rank, alpha = (f"model.lora_configs.0.lora_{name}" for name in ("rank", "alpha"))
    t.write("engines.actor.lora.rank", t.get(rank, 32), rank)
    t.write("engines.actor.lora.alpha", t.get(alpha, 32), alpha)
    t.imply("all linear layers, as by default", "model.lora_configs.0.target_modules")
    t.refuse("adapters are of the policy: `engines.actor.lora`", *(k for k in t.current if not t.is_recorded(k)))


TRAINER = (
    to("model.model_path", "model.path"),
    joint(
        _trainer,
        "trainer.trainer_strategy trainer.megatron.* trainer.ulysses_sequence_parallel_size",
        always=True,
    ),
    library_fields("trainer.megatron.override_transformer_config.*", "actor", "transformer"),
    joint(_tokens, "trainer.max_token_len_per_gpu trainer.use_dynamic_bsz trainer.use_remove_padding"),
    joint(_lora, "model.lora_configs.*"),
    to("trainer.critic_warmup", "nodes.update.critic_warmup"),
)


_OPTIM, _CLIP = "algorithm.optimizer", "trainer.grad_clip"


def _optimizer(t: Translation) -> None:
    for key, target in ((f"{_OPTIM}.lr", "lr"), (f"{_OPTIM}.weight_decay", "weight_decay"), (_CLIP, "clip_grad")):
        t.write(f"engines.actor.optimizer.{target}", t.get(key), key)
    if uses_critic(t):
        critic = "trainer.trainer_config.critic.optim.lr"
        t.write("engines.critic.optimizer.lr", t.get(critic, 1.0e-5), critic)
    write_betas(t, "actor", f"{_OPTIM}.betas")
    steps, ratio = f"{_OPTIM}.lr_warmup_steps", f"{_OPTIM}.lr_warmup_steps_ratio"
    write_steps(t, "actor", "lr_warmup_steps", steps, interval_of(t))
    if t.number(steps, 0) <= 0:
        write_warmup_ratio(t, "actor", ratio)
    t.imply("has no effect, or is off", steps, ratio)
    styles = (f"{_OPTIM}.lr_scheduler_type", f"{_OPTIM}.warmup_style")
    style = next((key for key in styles if is_known(t.get(key))), None)
    if style and write_shape(t, "actor", style) and t.get(style) != "constant":
        floor, rate = f"{_OPTIM}.min_lr_ratio", t.tree["engines.actor.optimizer.lr"]
        if isinstance(rate, float):
            t.write("engines.actor.lr_schedule.min_lr", t.get(floor) * rate, floor)


OPTIMIZER = (
    joint(
        _optimizer,
        under(_OPTIM, "lr weight_decay betas lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type warmup_style"),
        under(_OPTIM, "min_lr_ratio"),
        f"{_CLIP} trainer.trainer_config.critic.optim.lr",
        always=True,
    ),
)
