"""verl's ``megatron`` and ``fsdp_config`` of a section: layout, offload and Megatron's own fields."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, PARALLEL, library_fields
from dagrl.importing.parts import is_known
from dagrl.importing.table import Rule, Translation, implied, joint, refused_unless, to, under
from dagrl.importing.verl.common import context_parallel, has_own_rollout_nodes, is_megatron, trained_engines

_OFFLOAD = {"param_offload": "param", "grad_offload": "grad", "optimizer_offload": "optimizer"}


def layout(section: str, engine: str) -> Rule:
    """Translate Megatron's sizes of a section, and Ulysses' sequence parallelism with FSDP."""
    keys = [f"{section}.megatron.{size}" for size in PARALLEL]
    ulysses = (f"{section}.ulysses_sequence_parallel_size", f"{section}.fsdp_config.ulysses_sequence_parallel_size")
    sequence = f"{section}.megatron.sequence_parallel"

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
            return
        if not is_megatron(t):
            ranks = context_parallel(t, section)
            if ranks > 1:
                target = f"engines.{engine}.parallel.context_parallel_size"
                t.write(target, ranks, *ulysses, note="Ulysses' sequence parallelism is Megatron's context parallelism")
            t.imply("is 1, as by default", *(key for key in ulysses if t.get(key) == 1))
            t.imply("has no effect with FSDP", *keys, sequence)
            return
        for key, size in zip(keys, PARALLEL, strict=True):
            if t.given(key) and is_known(t.get(key)):
                t.write(f"engines.{engine}.parallel.{size}", t.get(key), key)
            elif t.given(key):
                t.imply("is null, as by default", key)
        tensor = t.number(keys[0], 1)
        if tensor > 1:
            t.write(f"engines.{engine}.parallel.sequence_parallel", t.get(sequence), sequence)
            if t.number(keys[4], 1) > 1 and not is_known(t.get(keys[5])):
                # In Megatron, and so in verl, experts are split like the other matrices unless this is set.
                t.write(f"engines.{engine}.parallel.expert_tensor_parallel_size", tensor, keys[5])
        t.imply("has no effect without tensor parallelism", sequence)
        t.refuse("has no effect with Megatron: `megatron.context_parallel_size` has", *ulysses)

    return joint(apply, *keys, sequence, *ulysses, always=True)


def offload(section: str, engine: str) -> Rule:
    """Translate the offloading of a section's parameters, gradients and optimizer between its tasks."""
    keys = {
        f"{section}.{part}.{name}": target
        for part in ("megatron", "fsdp_config", "fsdp", "model.fsdp_config")
        for name, target in _OFFLOAD.items()
    } | {f"{section}.{name}": target for name, target in _OFFLOAD.items()}

    def apply(t: Translation) -> None:
        for key in t.current:
            if not t.flag(key):
                t.imply("`sleep: auto` offloads only where engines do not fit together", key)
            elif has_own_rollout_nodes(t) and engine in trained_engines(t):
                t.write(f"engines.{engine}.offload.{keys[key]}", True, key)
            else:
                t.imply("`sleep: auto` offloads while another engine of the group works", key)

    return joint(apply, *keys)


def megatron_rest(section: str, engine: str) -> tuple[Rule, ...]:
    """Translate the other keys of a section's ``megatron``."""
    prefix = f"{section}.megatron"

    def checkpoint(t: Translation) -> None:
        path = t.get(f"{prefix}.dist_checkpointing_path")
        if t.flag(f"{prefix}.use_dist_checkpointing") and is_known(path):
            t.write(f"engines.{engine}.dist_checkpointing_path", path)
        else:
            t.imply_all("weights come from the model's folder")

    return (
        joint(checkpoint, under(prefix, "use_dist_checkpointing dist_checkpointing_path")),
        library_fields(f"{prefix}.override_transformer_config.*", engine, "transformer"),
        library_fields(f"{prefix}.override_ddp_config.*", engine, "ddp"),
        to(f"{prefix}.use_distributed_optimizer", f"engines.{engine}.optimizer.use_distributed_optimizer"),
        refused_unless(
            "disabled",
            "routes are recorded by `router_replay`, from the generator",
            under(prefix, "router_replay.mode"),
        ),
        refused_unless(False, "Megatron's FSDP is not built in", under(prefix, "use_megatron_fsdp")),
        refused_unless(False, "sequences are split evenly", under(prefix, "dynamic_context_parallel")),
        refused_unless((False, {}), "there is no training of quantized weights", under(prefix, "qat.*")),
        implied(
            "follows from the model and the devices",
            under(
                prefix,
                "override_ddp_config override_transformer_config use_mbridge vanilla_mbridge seed dtype "
                "param_dtype pad_* use_remove_padding forward_only load_weight extra* "
                "override_mcore_model_config* entropy_* dist_ckpt_* distrib_* dist_checkpointing_prefix "
                "router_replay.* max_seqlen_per_dp_cp_rank",
            ),
        ),
    )
