"""Sections, reasons and sizes that the tables of verl's sections share."""

from __future__ import annotations

from dagrl.importing.parts import padded_rows
from dagrl.importing.table import Translation

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

MEMORY = "changes memory or speed alone, by kernels that Megatron-core chooses"


def is_megatron(t: Translation) -> bool:
    config = str(t.get("--config-name") or "")
    return "megatron" in (t.get("model_engine"), t.get(f"{ACTOR}.strategy")) or "megatron" in config


def uses_critic(t: Translation) -> bool:
    return t.get("algorithm.adv_estimator") == "gae"


def trained_engines(t: Translation) -> tuple[str, ...]:
    """Return the trained engines: the actor, and the critic if there is one."""
    return ("actor", "critic") if uses_critic(t) else ("actor",)


def context_parallel(t: Translation, section: str) -> int:
    """Ranks that share each sequence: Megatron's context parallelism, or Ulysses' with FSDP."""
    megatron = t.number(f"{section}.megatron.context_parallel_size", 1)
    ulysses = t.number(f"{section}.ulysses_sequence_parallel_size")
    if ulysses is None:
        ulysses = t.number(f"{section}.fsdp_config.ulysses_sequence_parallel_size", 1)
    return int(megatron if is_megatron(t) else ulysses)


def packed_tokens(
    t: Translation, target: str, section: str, prefix: str, parallel: int, *, dynamic_key: str | None = None
) -> None:
    """Write ``tokens_per_micro_batch``.

    With dynamic batches verl packs ``max_token_len_per_gpu x sequence-parallel size`` tokens into a micro-batch of a
    model replica; otherwise it holds ``micro_batch_size_per_gpu`` rows, each padded to the longest prompt and response.
    """
    longest, rows = f"{section}.{prefix}max_token_len_per_gpu", f"{section}.{prefix}micro_batch_size_per_gpu"
    dynamic = dynamic_key or f"{section}.{prefix}use_dynamic_bsz"
    is_dynamic = t.get(dynamic)
    t.imply("tokens are packed by `tokens_per_micro_batch`", dynamic)
    if t.get(f"{ACTOR}.use_dynamic_bsz") if is_dynamic is None else is_dynamic:
        key = longest if t.number(longest) is not None else f"{ACTOR}.ppo_max_token_len_per_gpu"
        tokens = t.number(key, 16384)
        note = f"{tokens} a GPU x {parallel} that share each sequence" if parallel > 1 else ""
        t.write(target, int(tokens) * parallel, longest if t.given(longest) else key, note=note)
        return
    if t.number(rows):
        padded_rows(t, target, t.number(rows), rows)
    reason = "rows of all GPUs together, of older versions; `tokens_per_micro_batch` is for a model replica"
    t.refuse(reason, f"{section}.{prefix}micro_batch_size")


def has_turns(t: Translation) -> bool:
    """Return whether responses have turns; newer versions take tools without ``enable``."""
    prefix = f"{ROLLOUT}.multi_turn"
    files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    return t.flag(f"{prefix}.enable") or any(
        t.get(f"{section}.{name}") for section in (prefix, "data") for name in files
    )
