"""Sections and defaults that several tables of Trinity-RFT read."""

from __future__ import annotations

from typing import Any

from dagrl.importing.parts import val_label
from dagrl.importing.table import Translation

MODEL = "explorer.rollout_model"
TASKS = "buffer.explorer_input"
EVAL_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_new_tokens"}
"""Names of sampling options of a validation set -> dagrl's names."""
TYPES = {
    "ppo": ("ppo", "ppo", "k2", 1),
    "grpo": ("grpo", "ppo", "k2", 2),
    "dapo": ("grpo", "ppo", "none", 16),
    "reinforceplusplus": ("reinforceplusplus", "ppo", "k2", 2),
    "rloo": ("rloo", "ppo", "k2", 2),
    "opmd": ("opmd", "opmd", "k2", 2),
    "topr": ("reinforce", "topr", "k2", 2),
    "cispo": ("grpo", "cispo", "k2", 2),
    "gspo": ("grpo", "gspo", "k2", 2),
    "sapo": ("grpo", "sapo", "k2", 2),
    "gigpo": ("gigpo", "ppo", "k2", 8),
    "on_policy_distill": ("on_policy_distill", "ppo", "none", 8),
}
"""``algorithm_type`` -> its defaults of ``advantage_fn``, ``policy_loss_fn``, ``kl_loss_fn`` and ``repeat_times``."""


def type_default(t: Translation, index: int) -> Any:
    """Return a default of the ``algorithm_type``: the index is a place in `TYPES`."""
    return TYPES.get(str(t.get("algorithm.algorithm_type")), (None, None, "none", 1))[index]


def uses_critic(t: Translation) -> bool:
    return (t.get("algorithm.advantage_fn") or type_default(t, 0)) == "ppo"


def interval_of(t: Translation) -> int:
    """Return the optimizer steps between two weight syncs."""
    return max(1, int(t.number("synchronizer.sync_interval", 1)))


def eval_sets(t: Translation) -> list[tuple[str, str]]:
    """Return the sections of the validation sets, with their names in the pipeline."""
    sets: list[tuple[str, str]] = []
    section = f"{TASKS}.eval_tasksets"
    while t.given(f"{section}.{len(sets)}.path"):
        one = f"{section}.{len(sets)}"
        label = val_label(str(t.get(f"{one}.name", f"set_{len(sets)}")), len(sets))
        sets.append((one, f"set_{len(sets)}" if label in dict(sets).values() else label))
    return sets


def has_own_responses(t: Translation, index: int) -> bool:
    """Return whether a validation set has other sampling, or another number of responses, than the first one."""
    keys = (*(f"rollout_args.{name}" for name in EVAL_SAMPLING), "repeat_times")
    first, own = ([t.get(f"{TASKS}.eval_tasksets.{option}.{key}") for key in keys] for option in (0, index))
    return first != own


def is_megatron(t: Translation) -> bool:
    return t.get("trainer.trainer_strategy") == "megatron"
