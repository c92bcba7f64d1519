"""verl's ``optim`` of a section: the optimizer and its learning rate."""

from __future__ import annotations

from dagrl.importing.engines import NO_CRITIC, NO_SUCH_SHAPE, library_field, write_betas, write_warmup_ratio
from dagrl.importing.parts import is_known
from dagrl.importing.table import Rule, Translation, joint, refused_unless, under
from dagrl.importing.verl.common import is_megatron, trained_engines


def optimizer(section: str, engine: str) -> Rule:
    """Translate the optimizer of a section."""
    prefix = f"{section}.optim"
    clip = f"{section}.grad_clip"

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
            return
        target = f"engines.{engine}.optimizer"
        t.write(f"{target}.lr", t.get(f"{prefix}.lr"), f"{prefix}.lr")
        t.write(f"{target}.weight_decay", t.get(f"{prefix}.weight_decay"), f"{prefix}.weight_decay")
        used, other = (f"{prefix}.clip_grad", clip) if is_megatron(t) else (clip, f"{prefix}.clip_grad")
        if t.given(used):
            t.write(f"{target}.clip_grad", t.get(used), used)
            t.imply("`grad_clip` bounds with FSDP, `optim.clip_grad` with Megatron", other)
        elif t.given(other):
            t.write(f"{target}.clip_grad", t.get(other), other)
        write_betas(t, engine, f"{prefix}.betas")
        if str(t.get(f"{prefix}.optimizer", "adam")).casefold() in ("adam", "adamw"):
            t.imply("Adam with decoupled weight decay, as by default", f"{prefix}.optimizer")
        else:
            t.refuse("optimizers are adam and sgd", f"{prefix}.optimizer")
        overrides = f"{prefix}.override_optimizer_config."
        for key in t.current:
            if key.startswith(overrides):
                library_field(t, key, engine, "optimizer", key.removeprefix(overrides))
        for name in ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            t.copy(f"{prefix}.{name}", f"{target}.{name}")

    keys = [
        f"{prefix}.{name}"
        for name in (
            *("lr", "weight_decay", "clip_grad", "betas", "optimizer", "use_precision_aware_optimizer"),
            *("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
        )
    ]
    return joint(apply, under(prefix, "override_optimizer_config*"), *keys, clip, always=True)


def schedule(section: str, engine: str) -> Rule:
    """Translate the learning rate's schedule, which verl too moves once for each training batch."""
    prefix = f"{section}.optim"
    styles = ("lr_decay_style", "lr_scheduler_type", "warmup_style")

    def apply(t: Translation) -> None:
        if engine not in trained_engines(t):
            t.imply_all(NO_CRITIC)
            return
        target = f"engines.{engine}.lr_schedule"
        if is_known(t.get(f"{prefix}.lr_decay_steps")) and t.given(f"{prefix}.lr_decay_steps"):
            t.write(f"{target}.lr_decay_steps", t.get(f"{prefix}.lr_decay_steps"), f"{prefix}.lr_decay_steps")
        warmup, ratio = t.number(f"{prefix}.lr_warmup_steps", -1), t.number(f"{prefix}.lr_warmup_steps_ratio", 0)
        if warmup > 0:
            t.write(f"{target}.lr_warmup_steps", warmup, f"{prefix}.lr_warmup_steps")
        else:
            write_warmup_ratio(t, engine, f"{prefix}.lr_warmup_steps_ratio")
        if warmup <= 0 and not ratio:
            names = (f"{prefix}.lr_warmup_steps", f"{prefix}.lr_warmup_steps_ratio")
            t.imply("there is no warm-up, as by default", *names)
        key = next((f"{prefix}.{style}" for style in styles if is_known(t.get(f"{prefix}.{style}"))), None)
        style = t.get(key) if key else "constant"
        if key and style in ("constant", "linear", "cosine", "inverse-square-root"):
            t.write(f"{target}.lr_decay_style", style, key)
        elif key:
            t.refuse(NO_SUCH_SHAPE, key)
        if style in ("linear", "cosine"):
            floor, part = t.number(f"{prefix}.min_lr"), t.number(f"{prefix}.min_lr_ratio", 0)
            lr = t.tree.get(f"engines.{engine}.optimizer.lr")
            if floor:
                t.write(f"{target}.min_lr", floor, f"{prefix}.min_lr")
            elif part and isinstance(lr, int | float):
                t.write(f"{target}.min_lr", part * lr, f"{prefix}.min_lr_ratio", note=f"{part} of {lr}")

    names = ("lr_warmup_steps", "lr_warmup_steps_ratio", *styles, "min_lr", "min_lr_ratio", "lr_decay_steps")
    return joint(apply, *(f"{prefix}.{name}" for name in names))


def optimizer_rest(section: str) -> Rule:
    """Keys of an optimizer that need no counterpart, or have none."""
    prefix = f"{section}.optim"
    return refused_unless(
        (-1, 0, 0.0, 0.5, "constant", "exponential", "torch.optim", False, True, "fp32"),
        "the learning rate has a warm-up and a shape; see `lr_schedule`",
        under(
            prefix,
            "total_training_steps num_cycles zero_indexed_step optimizer_impl lr_warmup_init "
            "weight_decay_incr_style lr_wsd_* muon_* use_*",
        ),
    )
