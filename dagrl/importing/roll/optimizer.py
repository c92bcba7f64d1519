"""ROLL's ``training_args``: the optimizer and its learning rate."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, NO_SUCH_SHAPE, write_warmup_ratio
from dagrl.importing.roll.batches import optimizer_steps
from dagrl.importing.roll.common import CRITIC, TRAIN, uses_critic
from dagrl.importing.table import Translation, joint

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
        schedule = f"engines.{engine}.lr_schedule"
        style = f"{prefix}.lr_scheduler_type"
        if t.get(style, "linear") in ("constant", "linear", "cosine"):
            t.write(
                f"{schedule}.lr_decay_style",
                t.get(style, "linear"),
                style,
                note="" if t.given(style) else "default of ROLL",
            )
        else:
            t.refuse(NO_SUCH_SHAPE, style)
        warmup = f"{prefix}.warmup_steps"
        if t.number(warmup, 0):
            each = optimizer_steps(t)
            note = f"optimizer steps there, {each} a step" if each > 1 else ""
            t.write(f"{schedule}.lr_warmup_steps", -(-int(t.get(warmup)) // each), warmup, note=note)
            t.imply("`warmup_steps` counts alone", f"{prefix}.warmup_ratio")
        else:
            write_warmup_ratio(t, engine, f"{prefix}.warmup_ratio")


RULES = (
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
