"""ROLL's teachers of on-policy distillation, each of the rows with its tags."""

from __future__ import annotations

from dagrl.importing.engines import PARALLEL
from dagrl.importing.parts import put_groups
from dagrl.importing.roll.common import INFER, STRATEGY, TRAIN, data_parallel_ranks, devices_of, is_pure_opd
from dagrl.importing.table import Translation, joint
from dagrl.importing.teachers import ADVANTAGE, engine_name, put_teachers

_RECOMPUTE = ("enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute")


@joint("use_opd is_pure_opd pure_opd_pipeline_type teacher.*")
def teachers(t: Translation) -> None:
    if not (t.flag("use_opd") or is_pure_opd(t)):
        return
    several = not any(key.startswith("teacher.model_args.") for key in t.current)
    names = list(dict.fromkeys(key.split(".")[1] for key in t.current if key.startswith("teacher."))) if several else []
    prefixes = {engine_name(name): f"teacher.{name}" for name in names} or {"teacher": "teacher"}
    rows: dict[str, list[str] | None] = {}
    for engine, prefix in prefixes.items():
        _engine(t, engine, prefix)
        tags = f"{prefix}.tag_included"
        rows[engine] = [str(tag) for tag in t.get(tags) or ()] or None
        t.imply("is `rows` of the teacher; a tag is the column `data_source` here", tags)
    put_teachers(t, rows, "data_source")
    _weights(t, list(prefixes.values()))
    if not _recomputes_old(t):
        note = "the teacher is compared with the generator's log-probs, where the trainer's are not computed before"
        t.write("nodes.advantage.read", {"old_logprob": "rollout_logprob"}, *_RECOMPUTE, note=note)
    tags_of = [tag for values in rows.values() for tag in values or ["*"]]
    if len(set(tags_of)) < len(tags_of) or (len(rows) > 1 and None in rows.values()):
        keys = [f"{prefix}.tag_included" for prefix in prefixes.values()]
        t.refuse("a row has one teacher: the first that reads it", *keys)
    if t.get("kl_penalty") not in ("kl", None):
        t.refuse("the advantage is the difference of the log-probs itself (kl)", "kl_penalty")
    t.imply("a teacher computes log-probs alone", *t.current)


def _engine(t: Translation, engine: str, prefix: str) -> None:
    path = f"{prefix}.model_args.model_name_or_path"
    t.copy(path, f"engines.{engine}.model.path")
    for size in PARALLEL:
        key = f"{prefix}.{STRATEGY}.{size}"
        if t.number(key, 1) > 1:
            t.write(f"engines.{engine}.parallel.{size}", t.get(key), key)
    mapping = f"{prefix}.device_mapping"
    own, machine = devices_of(t, prefix), int(t.number("num_gpus_per_node", 8))
    if own and not own & (devices_of(t, TRAIN) | devices_of(t, INFER)):
        put_groups(t, {engine: (-(-len(own) // machine), min(len(own), machine))})
        t.put(f"engines.{engine}.group", engine)
    else:
        t.put(f"engines.{engine}.group", t.tree.get("engines.actor.group"))
        t.imply("is on the actor's GPUs here", mapping)


def _recomputes_old(t: Translation) -> bool:
    """Whether the trainer computes log-probs before training, which ROLL sets itself for several steps a batch."""
    enabled, disabled = map(t.flag, _RECOMPUTE)
    if disabled or enabled:
        return not disabled
    if t.get("adv_estimator") in ("step_reinforce", "gigpo") or t.number("init_kl_coef", 0) > 0:
        return True
    samples = t.number("rollout_batch_size", 128) * t.number("num_return_sequences_in_group", 1)
    rows = t.number(f"{TRAIN}.training_args.per_device_train_batch_size", 8)
    rows *= t.number(f"{TRAIN}.training_args.gradient_accumulation_steps", 1)
    # ROLL knows only the ranks of these strategies.
    is_counted = str(t.get(f"{TRAIN}.strategy_args.strategy_name")) in ("megatron_train", "fsdp2_train")
    return samples // (data_parallel_ranks(t) if is_counted else 1) // rows > 1


def _weights(t: Translation, prefixes: list[str]) -> None:
    keys = [f"{prefix}.opd_kl_coef" for prefix in prefixes]
    values = [t.get(key, 1.0) for key in keys]
    t.write(f"{ADVANTAGE}.coef", values[0], *keys)
    if any(value != values[0] for value in values):
        t.refuse("teachers share one weight, `distillation.coef`; the first teacher's is used", *keys)
