"""Trinity-RFT's engines: groups of GPUs, models, layouts, optimizers and micro-batches."""

from __future__ import annotations

import math

from dagrl.importing import engines, parts
from dagrl.importing.table import Translation, implied, is_known, joint, refused_unless, to, under
from dagrl.importing.trinity.common import MODEL, interval_of, is_megatron, uses_critic


@joint("cluster.node_num cluster.gpu_per_node", under(MODEL, "engine_num"), always=True)
def _groups(t: Translation) -> None:
    """Explorer and trainer have separate GPUs: the first for the engines, the rest for the trainer."""
    nodes, gpus = int(t.number("cluster.node_num", 1)), int(t.number("cluster.gpu_per_node", 8))
    number, tensor = f"{MODEL}.engine_num", f"{MODEL}.tensor_parallel_size"
    keys, total = ("cluster.node_num", "cluster.gpu_per_node"), nodes * gpus
    rollout = int(t.number(number, 1) * t.number(tensor, 1) * t.number(f"{MODEL}.data_parallel_size", 1))
    if t.get("mode") == "colocate" or rollout >= total:
        parts.put_groups(t, {"gpus": (nodes, gpus)})
        t.write("groups.gpus.gpus_per_node", gpus, *keys)
        t.put("engines.actor.group", "gpus")
        t.put("engines.generator.group", "gpus")
    else:
        train = total - rollout
        machines = {"train": _split(train, gpus), "rollout": _split(rollout, gpus)}
        parts.put_groups(t, machines)
        note = f"{rollout} GPUs of {total} for the engines, {train} for the trainer"
        t.write("groups.train.gpus_per_node", machines["train"][1], *keys, number, note=note)
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


@joint("synchronizer.sync_offset synchronizer.sync_style")
def _ahead(t: Translation) -> None:
    offset, style, syncs = "synchronizer.sync_offset", "synchronizer.sync_style", interval_of(t)
    if t.number(offset, 0):
        note = f"/ sync_interval {syncs}, rounded up"
        t.write("schedule.max_staleness", math.ceil(t.get(offset) / syncs), offset, note=note)
    elif "dynamic" in str(t.get(style)) or str(t.get(style)) == "explorer_driven":
        t.write("schedule.max_staleness", 2, style, note="the generator works ahead, but no further")


CLUSTER = (
    _groups,
    _ahead,
    refused_unless(("nccl", "memory"), "weights go over NCCL or the object store", "synchronizer.sync_method"),
)


@joint("trainer.trainer_strategy trainer.megatron.* trainer.ulysses_sequence_parallel_size", always=True)
def _trainer(t: Translation) -> None:
    key, sequence = "trainer.trainer_strategy", "trainer.ulysses_sequence_parallel_size"
    if uses_critic(t):
        engines.put_critic(t)
    trained = ("actor", "critic") if uses_critic(t) else ("actor",)
    if is_megatron(t):
        t.copy(key, "engines.actor.backend")
        for engine in trained:
            engines.write_layout(t, engine, "trainer.megatron")
        return
    t.refuse(engines.FSDP, key)
    for engine in trained:
        t.copy(sequence, f"engines.{engine}.parallel.context_parallel_size", above=1)
        for name, value in engines.RECOMPUTE.items():
            t.put(f"engines.{engine}.transformer.{name}", value)


@joint("trainer.max_token_len_per_gpu")
def _tokens(t: Translation) -> None:
    key = "trainer.max_token_len_per_gpu"
    sizes = ("trainer.ulysses_sequence_parallel_size", "trainer.megatron.context_parallel_size")
    for node in ("update", "old", "ref", "values", "critic"):
        if t.number(key) and f"nodes.{node}.op" in t.tree:
            tokens = t.get(key) * max(t.number(size, 1) for size in sizes)
            t.write(f"nodes.{node}.tokens_per_micro_batch", tokens, key)


@joint("model.lora_configs.*")
def _lora(t: Translation) -> None:
    for name in ("rank", "alpha"):
        t.copy(f"model.lora_configs.0.lora_{name}", f"engines.actor.lora.{name}", 32)
    t.imply("all linear layers, as by default", "model.lora_configs.0.target_modules")
    t.refuse("adapters are of the policy: `engines.actor.lora`", *t.rest())


TRAINER = (
    to("model.model_path", "model.path"),
    _trainer,
    engines.library_fields("trainer.megatron.override_transformer_config.*", "actor", "transformer"),
    _tokens,
    implied("rows are always packed by `tokens_per_micro_batch`", "trainer.use_dynamic_bsz trainer.use_remove_padding"),
    _lora,
    to("trainer.critic_warmup", "nodes.update.critic_warmup"),
)


_OPTIM = "algorithm.optimizer"


@joint(
    under(_OPTIM, "lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type warmup_style min_lr_ratio betas"),
    "trainer.trainer_config.critic.optim.lr",
    always=True,
)
def _optimizer(t: Translation) -> None:
    if uses_critic(t):
        t.copy("trainer.trainer_config.critic.optim.lr", "engines.critic.optimizer.lr", 1.0e-5)
    engines.write_betas(t, "actor", f"{_OPTIM}.betas")
    steps = f"{_OPTIM}.lr_warmup_steps"
    engines.write_steps(t, "actor", "lr_warmup_steps", steps, interval_of(t))
    if t.number(steps, 0) <= 0:
        engines.write_warmup_ratio(t, "actor", f"{_OPTIM}.lr_warmup_steps_ratio")
    style = t.first(f"{_OPTIM}.lr_scheduler_type", f"{_OPTIM}.warmup_style")
    if style and engines.write_shape(t, "actor", style) and t.get(style) != "constant":
        floor, rate = f"{_OPTIM}.min_lr_ratio", t.tree.get("engines.actor.optimizer.lr")
        if isinstance(rate, float) and is_known(t.get(floor)):
            t.write("engines.actor.lr_schedule.min_lr", t.get(floor) * rate, floor)


OPTIMIZER = (
    to(f"{_OPTIM}.lr", "engines.actor.optimizer.lr", write_default=True),
    to(f"{_OPTIM}.weight_decay", "engines.actor.optimizer.weight_decay", write_default=True),
    to("trainer.grad_clip", "engines.actor.optimizer.clip_grad", write_default=True),
    _optimizer,
)
