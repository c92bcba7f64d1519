"""Trinity-RFT's ``algorithm.optimizer``: the optimizer and its learning rate."""

from __future__ import annotations

from dagrl.importing.engines import NO_SUCH_SHAPE, write_betas, write_warmup_ratio
from dagrl.importing.parts import is_known
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import VERL, interval_of, uses_critic

_OPTIMIZERS = ("algorithm.optimizer", f"{VERL}.actor_rollout_ref.actor.optim")
_WARMUPS = tuple(f"{each}.{name}" for name in ("lr_warmup_steps", "lr_warmup_steps_ratio") for each in _OPTIMIZERS)


def _optimizer(t: Translation) -> None:
    lr = "algorithm.optimizer.lr"
    old = f"{VERL}.actor_rollout_ref.actor.optim.lr"
    key = lr if t.given(lr) or not t.given(old) else old
    t.write("engines.actor.optimizer.lr", t.get(key), key)
    decay = "algorithm.optimizer.weight_decay"
    t.write("engines.actor.optimizer.weight_decay", t.get(decay), decay)
    clip = "trainer.grad_clip"
    t.write("engines.actor.optimizer.clip_grad", t.get(clip), clip)
    if uses_critic(t):
        critic = f"{VERL}.critic.optim.lr"
        t.write("engines.critic.optimizer.lr", t.get(critic, 1.0e-5), critic)
    write_betas(t, "actor", "algorithm.optimizer.betas")
    syncs, schedule = interval_of(t), "engines.actor.lr_schedule"
    warmup = next((key for key in _WARMUPS if t.number(key, 0) > 0), None)
    if warmup and warmup.endswith("ratio"):
        write_warmup_ratio(t, "actor", warmup)
    elif warmup:
        t.write(
            f"{schedule}.lr_warmup_steps",
            -(-t.get(warmup) // syncs),
            warmup,
            note=f"/ sync_interval {syncs}" if syncs > 1 else "",
        )
    t.imply("has no effect, or is off", *_WARMUPS)
    style = next(
        (
            key
            for key in ("algorithm.optimizer.lr_scheduler_type", "algorithm.optimizer.warmup_style")
            if is_known(t.get(key))
        ),
        None,
    )
    if style and t.get(style) in ("constant", "linear", "cosine"):
        t.write(f"{schedule}.lr_decay_style", t.get(style), style)
        ratio = "algorithm.optimizer.min_lr_ratio"
        if t.get(style) != "constant" and isinstance(t.tree["engines.actor.optimizer.lr"], float):
            t.write(f"{schedule}.min_lr", t.get(ratio) * t.tree["engines.actor.optimizer.lr"], ratio)
    elif style:
        t.refuse(NO_SUCH_SHAPE, style)


RULES = (
    joint(
        _optimizer,
        "algorithm.optimizer.lr algorithm.optimizer.weight_decay algorithm.optimizer.betas "
        "algorithm.optimizer.lr_scheduler_type algorithm.optimizer.warmup_style "
        "algorithm.optimizer.min_lr_ratio trainer.grad_clip",
        under(VERL, "actor_rollout_ref.actor.optim.lr critic.optim.lr"),
        *_WARMUPS,
        always=True,
    ),
)
