"""verl's ``critic``."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, RECOMPUTE, critic_model, put_critic
from dagrl.importing.parts import put_critic_nodes
from dagrl.importing.table import Translation, implied, joint, refused_unless
from dagrl.importing.verl.common import ACTOR, MEMORY, MODEL, context_parallel, is_megatron, packed_tokens, uses_critic
from dagrl.importing.verl.megatron import layout, megatron_rest, offload
from dagrl.importing.verl.optimizer import optimizer, optimizer_rest


def _engine(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic(t)
    critic_model(t, "critic.model.path", f"{MODEL}.path")
    key = "critic.model.enable_gradient_checkpointing"
    if t.get(key) is not False and not is_megatron(t):
        for name, value in RECOMPUTE.items():
            t.write(f"engines.critic.transformer.{name}", value, key)
    else:
        t.imply("with Megatron, `override_transformer_config` decides what is computed anew", key)


def _nodes(t: Translation) -> None:
    if not uses_critic(t):
        t.imply_all(NO_CRITIC)
        return
    put_critic_nodes(t)
    for name, target in (
        ("ppo_mini_batch_size", "mini_batch"),
        ("ppo_epochs", "epochs"),
        ("loss_agg_mode", "aggregation"),
    ):
        actor = f"{ACTOR}.{name}"
        if t.given(f"critic.{name}"):
            t.write(f"nodes.critic.{target}", t.get(f"critic.{name}"), f"critic.{name}")
        elif target == "mini_batch" or t.given(actor):
            t.write(f"nodes.critic.{target}", t.get(actor), actor)
    t.copy("critic.cliprange_value", "nodes.critic.cliprange_value")
    parallel = context_parallel(t, "critic")
    packed_tokens(
        t, "nodes.critic.tokens_per_micro_batch", "critic", "ppo_", parallel, dynamic_key="critic.use_dynamic_bsz"
    )
    if any(t.given(f"critic.forward_{name}_per_gpu") for name in ("max_token_len", "micro_batch_size")):
        dynamic = "critic.use_dynamic_bsz"
        packed_tokens(t, "nodes.values.tokens_per_micro_batch", "critic", "forward_", parallel, dynamic_key=dynamic)


RULES = (
    joint(_engine, "critic.model.path critic.model.enable_gradient_checkpointing", always=True),
    layout("critic", "critic"),
    offload("critic", "critic"),
    optimizer("critic", "critic"),
    joint(
        _nodes,
        "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode critic.cliprange_value "
        "critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu "
        "critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size_per_gpu "
        "critic.forward_micro_batch_size critic.ppo_micro_batch_size",
        always=True,
    ),
    *megatron_rest("critic", "critic"),
    implied(
        MEMORY,
        "critic.model.* critic.fsdp* critic.strategy critic.enable critic.shuffle critic.checkpoint.* "
        "critic.rollout_n critic.data_loader_seed critic.load_weight critic.nccl_timeout critic._target_",
    ),
    refused_unless(None, "is `profile` of the pipeline (docs/profiling.md)", "critic.profile*"),
    optimizer_rest("critic"),
)
