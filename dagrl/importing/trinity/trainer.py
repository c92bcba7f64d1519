"""Trinity-RFT's ``trainer`` and ``model``: the trained engines."""

from __future__ import annotations

from dagrl.importing.engines import FSDP, PARALLEL, RECOMPUTE, library_fields, put_critic
from dagrl.importing.parts import is_known
from dagrl.importing.table import Translation, joint, to, under
from dagrl.importing.trinity.common import VERL, is_megatron, uses_critic


def _trainer(t: Translation) -> None:
    key = "trainer.trainer_strategy"
    if is_megatron(t):
        t.write("engines.actor.backend", "megatron", key, f"{VERL}.actor_rollout_ref.actor.strategy")
    else:
        t.refuse(FSDP, key, f"{VERL}.actor_rollout_ref.actor.strategy")
    engines = ("actor", "critic") if uses_critic(t) else ("actor",)
    if uses_critic(t):
        put_critic(t)
    for name in (*PARALLEL, "sequence_parallel"):
        keys = (f"trainer.megatron.{name}", f"{VERL}.actor_rollout_ref.actor.megatron.{name}")
        given = next((each for each in keys if t.given(each) and is_known(t.get(each))), None)
        if given and is_megatron(t):
            for engine in engines:
                if name == "sequence_parallel" and t.tree.get(f"engines.{engine}.parallel.{PARALLEL[0]}", 1) == 1:
                    t.imply("has no effect without tensor parallelism", given)
                    continue
                t.write(f"engines.{engine}.parallel.{name}", t.get(given), given)
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
    keys = ("trainer.max_token_len_per_gpu", f"{VERL}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    key = next((each for each in keys if t.number(each)), None)
    if key:
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


RULES = (
    to("model.model_path", "model.path"),
    joint(
        _trainer,
        "trainer.trainer_strategy trainer.megatron.* trainer.ulysses_sequence_parallel_size",
        under(VERL, "actor_rollout_ref.actor.strategy"),
        *(f"{VERL}.actor_rollout_ref.actor.megatron.{name}" for name in (*PARALLEL, "sequence_parallel")),
        always=True,
    ),
    library_fields(f"{VERL}.actor_rollout_ref.actor.megatron.override_transformer_config.*", "actor", "transformer"),
    joint(
        _tokens,
        "trainer.max_token_len_per_gpu trainer.use_dynamic_bsz trainer.use_remove_padding",
        under(VERL, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    ),
    joint(_lora, "model.lora_configs.*"),
    to("trainer.critic_warmup", "nodes.update.critic_warmup"),
)
