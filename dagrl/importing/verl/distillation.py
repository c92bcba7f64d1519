"""verl's ``distillation``: teachers, and the loss of their log-probs."""

from __future__ import annotations

from dagrl.importing.engines import PARALLEL
from dagrl.importing.parts import kl_estimator, put_groups
from dagrl.importing.table import Translation, joint
from dagrl.importing.teachers import ADVANTAGE, LOSS, SAMPLED, SERVED, engine_name, put_teachers, without_policy
from dagrl.importing.verl.common import ACTOR, CORRECTION

_LOSS = "distillation.distillation_loss"
_MODELS = "distillation.teacher_models"
_SIZES = {"tensor_model_parallel_size": PARALLEL[0], "pipeline_model_parallel_size": PARALLEL[1]}
_WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_DEFAULT_SIZES = {"tensor_model_parallel_size": 2}


@joint("distillation.*")
def distillation(t: Translation) -> None:
    if not t.flag("distillation.enabled"):
        return
    _loss(t, _teachers(t))
    t.imply(SERVED, *(key for key in t.current if ".inference." in key))
    sizes = ("enabled", "n_gpus_per_node", "nnodes")
    t.imply("is the teacher's engine, on its group", *(f"distillation.{name}" for name in sizes))
    choice = (f"{_LOSS}.{name}" for name in ("loss_mode", "use_policy_gradient", "use_task_rewards"))
    t.imply("is `distillation` of the loss or of the advantage, with or without rewards", *choice)


def _teachers(t: Translation) -> list[str]:
    """Verl drops ``teacher_model`` if there are others, and reads ``key`` only then."""
    names = list(dict.fromkeys(key.split(".")[2] for key in t.below(_MODELS)))
    several = [name for name in names if name != "teacher_model"]
    pool, machines = "distillation.n_gpus_per_node", "distillation.nnodes"
    rows: dict[str, list[str] | None] = {}
    for name in several or ["teacher_model"]:
        prefix = f"{_MODELS}.{name}"
        engine = engine_name(name) if several else "teacher"
        rows[engine] = [str(t.get(f"{prefix}.key"))] if several else None
        t.write(f"engines.{engine}.model.path", t.get(f"{prefix}.model_path"), f"{prefix}.model_path")
        sizes = {size: t.number(f"{prefix}.inference.{size}", _DEFAULT_SIZES.get(size, 1)) for size in _SIZES}
        for size, value in sizes.items():
            if value != 1:
                t.write(f"engines.{engine}.parallel.{_SIZES[size]}", value, f"{prefix}.inference.{size}")
        machine = t.number(pool, 0)
        ranks = t.number(f"{prefix}.num_replicas", 0) * t.number(f"{prefix}.inference.data_parallel_size", 1)
        for value in sizes.values():
            ranks *= value
        if not several:
            ranks = machine * t.number(machines, 1)
        if ranks > 0 and machine > 0:
            put_groups(t, {engine: (-(-ranks // machine), min(ranks, machine))})
            t.put(f"engines.{engine}.group", engine)
        else:
            t.put(f"engines.{engine}.group", "gpus")
    nodes = put_teachers(t, rows, str(t.get("distillation.teacher_key")), candidates=_over_candidates(t))
    t.imply("is `rows` of each teacher", "distillation.teacher_key", *(f"{_MODELS}.{name}.key" for name in names))
    return nodes


def _over_candidates(t: Translation) -> bool:
    return t.get(f"{_LOSS}.loss_mode") == "forward_kl_topk" and not t.flag(f"{_LOSS}.use_policy_gradient")


def _loss(t: Translation, nodes: list[str]) -> None:
    mode, gradient, rewards = (f"{_LOSS}.{name}" for name in ("loss_mode", "use_policy_gradient", "use_task_rewards"))
    coef, clamp = f"{_LOSS}.distillation_loss_coef", f"{_LOSS}.loss_max_clamp"
    by_advantage, form = t.flag(gradient), kl_estimator(t.get(mode))
    target = ADVANTAGE if by_advantage else LOSS
    if _over_candidates(t):
        _candidates(t, nodes, mode)
    elif form not in (("k1",) if by_advantage else SAMPLED):
        known = "k1, whose gradient is the divergence's" if by_advantage else ", ".join(SAMPLED)
        t.refuse(f"losses with a counterpart are {known}; the default of dagrl is used instead", mode, gradient)
    elif not by_advantage:
        t.write(f"{LOSS}.divergence", form, mode)
    if not t.flag(rewards):
        reason = "no reward is learned from: `use_task_rewards` is false"
        _without_terms(t, reason)
        if by_advantage:
            t.write("nodes.advantage.estimator", "none", rewards)
        else:
            without_policy(t, reason)
    t.write(f"{target}.coef", t.get(coef) if t.flag(rewards) else 1.0, coef)
    t.copy(clamp, f"{target}.clamp")
    if by_advantage:
        _policy(t, gradient, alone=not t.flag(rewards))


def _without_terms(t: Translation, reason: str) -> None:
    """Drop the terms that verl adds to the loss of rewards, which is 0 as a whole, and nodes that these alone read."""
    terms = ("kl_coef", "kl_estimator", "entropy_coef")
    nodes = ("ref", "values", "critic", "greedy", "baseline")
    engines = ("engines.reference.", "engines.critic.")
    unread = ("nodes.advantage.kl_in_reward.", *(f"nodes.{node}." for node in nodes), *engines)
    for target in [key for key in t.tree if key.startswith(unread)] + [f"nodes.update.loss.{term}" for term in terms]:
        t.drop(target, reason)


def _policy(t: Translation, gradient: str, *, alone: bool) -> None:
    """Verl's loss of a teacher's advantages is ``vanilla``, with separate bounds, beside the loss of the rewards."""
    plain, *ends = (f"{_LOSS}.clip_ratio{end}" for end in ("", "_low", "_high"))
    keys = [key if t.get(key, 0.2) is not None else plain for key in ends]
    bounds = {name: t.get(key, 0.2) for name, key in zip(("clip_ratio", "clip_ratio_high"), keys, strict=True)}
    bounds["dual_clip"] = 3.0
    section = "nodes.update.loss"
    if alone:
        _vanilla(t, "a teacher's loss is `vanilla` there")
        for (name, value), key in zip(bounds.items(), [*keys, gradient], strict=True):
            t.write(f"{section}.{name}", value, key)
        return
    reasons, low = [], t.tree.get(f"{section}.clip_ratio")
    if t.tree.get(f"{section}.policy", "ppo_clip") != "ppo_clip":
        reasons.append("verl has a separate loss, `vanilla`, if the rewards have another")
    elif [low, t.tree.get(f"{section}.clip_ratio_high", low), t.tree.get(f"{section}.dual_clip")] != [*bounds.values()]:
        reasons.append(f"verl has a separate loss, clipped at {', '.join(map(str, bounds.values()))}")
        t.refuse("one loss has one clip: `nodes.update.loss.clip_ratio`", *keys)
    if t.tree.get("nodes.advantage.estimator") in _WHITENED:
        reasons.append("no part in the whitening of the rewards' advantages")
    if reasons:
        t.refuse(f"a teacher has {', and '.join(reasons)}; here it is a term of the one advantage", gradient)


def _vanilla(t: Translation, reason: str) -> None:
    """Drop the actor's loss, except its aggregation, which verl also uses for the teacher's loss."""
    kept = (f"{LOSS}.", "nodes.update.loss.aggregation")
    actors = ("nodes.update.loss.", "nodes.held.")
    for target in [key for key in t.tree if key.startswith(actors) and not key.startswith(kept)]:
        t.drop(target, reason)
    if t.flag(f"{CORRECTION}.bypass_mode"):  # Weights and criteria belong to the loss of the rewards.
        for target in [key for key in t.tree if key.startswith("nodes.update.rollout_correction.")]:
            t.drop(target, reason)
    mode = f"{ACTOR}.loss_agg_mode"
    if t.get(mode) != t.tree.get("nodes.update.loss.aggregation"):
        t.write("nodes.update.loss.aggregation", t.get(mode), mode)


def _candidates(t: Translation, nodes: list[str], mode: str) -> None:
    """Verl compares the teacher's likeliest tokens alone, whose probabilities it does not divide by their sum."""
    count, least = f"{_LOSS}.topk", f"{_LOSS}.log_prob_min_clamp"
    t.write(f"{LOSS}.divergence", "forward_kl", mode)
    t.put(f"{LOSS}.outside", "ignore")
    for node in nodes:
        t.copy(count, f"nodes.{node}.top_k")
    t.copy(least, f"{LOSS}.min_logprob")
