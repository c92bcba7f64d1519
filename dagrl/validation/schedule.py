"""``schedule``: samples of older weights, weight updates during a rollout, updates that stream."""

from __future__ import annotations

from dagrl.config.errors import Place, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import EngineSpec, Pipeline, UpdateNode
from dagrl.graph.dag import Graph
from dagrl.graph.updates import hindrance

_STALENESS: Place = ("schedule", "max_staleness")
_IN_FLIGHT: Place = ("schedule", "in_flight_weight_update")
_STREAM: Place = ("schedule", "stream_update")


def check_schedule(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report a schedule that the engines or updates do not support; `graph` is None if it has problems."""
    schedule, prompts = pipeline.schedule, pipeline.data.prompts_per_step
    if "shards_per_step" in schedule.model_fields_set and schedule.shards_per_step > prompts:
        message = f"a shard holds whole prompts, and a step has {prompts} (data.prompts_per_step); lower it"
        findings.error(("schedule", "shards_per_step"), message, "too-many-shards")
    if schedule.max_staleness > 0:
        _warn_of_shared_group(pipeline, findings, _STALENESS, "samples get older, but nothing overlaps")
        _warn_of_bias(pipeline, findings)
        if schedule.in_flight_weight_update:
            _check_in_flight(pipeline, findings)
    else:
        _warn_of_no_effect(pipeline, findings)
    if schedule.stream_update:
        _warn_of_shared_group(pipeline, findings, _STREAM, "no update starts before the rollout ends")
        if schedule.max_staleness > 0 and not schedule.in_flight_weight_update:
            message = "the next rollout has no weights until the update ends; add `in_flight_weight_update: true`"
            findings.warning(_STREAM, message, "rollout-waits-for-update")
        for name, node in pipeline.nodes.items():
            if isinstance(node, UpdateNode) and (message := hindrance(pipeline, name, node, graph)):
                findings.error(_STREAM, message, "update-cannot-stream")


def _warn_of_no_effect(pipeline: Pipeline, findings: Findings) -> None:
    schedule = pipeline.schedule
    if schedule.in_flight_weight_update:
        message = removal("has no effect with max_staleness 0, where no rollout runs beside an update", "raise that")
        findings.warning(_IN_FLIGHT, message, "option-without-effect")
    if schedule.stale_samples != "auto" and not any(node.partial_rollout for node in pipeline.rollouts.values()):
        message = removal("has no effect with max_staleness 0, where no sample is of older weights", "raise that")
        findings.warning(("schedule", "stale_samples"), message, "option-without-effect")


def _warn_of_shared_group(pipeline: Pipeline, findings: Findings, place: Place, effect: str) -> None:
    for name, engine in _with_new_weights(pipeline).items():
        trainer = pipeline.engines.get(engine.weights_from or "")
        if trainer is not None and trainer.group == engine.group:
            why = f"`{name}` and `{engine.weights_from}` take turns on group `{engine.group}`: {effect}"
            findings.warning(place, removal(why, "use different groups"), "shared-group")


def _warn_of_bias(pipeline: Pipeline, findings: Findings) -> None:
    for name, node in pipeline.nodes.items():
        # The simple form of mirror descent, opmd, is off-policy.
        if not isinstance(node, UpdateNode) or node.loss.policy == "opmd":
            continue
        if node.rollout_correction is None and not node.takes_rollout_for_old:
            remedy = "set `rollout_correction: {rollout_is: token}` there, or `read: {old_logprob: rollout_logprob}`"
            message = f"`{name}` treats samples of older weights as its own; {remedy}"
            findings.warning(_STALENESS, message, "uncorrected-staleness")


def _check_in_flight(pipeline: Pipeline, findings: Findings) -> None:
    sampling = {node.engine for node in pipeline.rollouts.values()}
    for name, engine in _with_new_weights(pipeline).items():
        place: Place = ("engines", name)
        if name not in sampling:
            continue  # A judge gets its weights between two calls.
        if not engine.updates_in_flight:
            message = removal(f"`{name}`, a {engine.backend} engine, takes no new weights during a rollout")
            findings.error(_IN_FLIGHT, message, "no-in-flight-updates")
        elif engine.weight_sync.pause == "abort":
            remedy = "set `weight_sync: {pause: retract}` to continue them, or `in_place` to also keep their cache"
            message = f"`pause: abort` ends responses that the step needs; {remedy}"
            given = "pause" in engine.weight_sync.model_fields_set
            where = (*place, "weight_sync", "pause") if given else _IN_FLIGHT
            findings.error(where, message if given else f"engine `{name}`: {message}", "pause-aborts")


def _with_new_weights(pipeline: Pipeline) -> dict[str, EngineSpec]:
    """Engines that receive weights of a trained engine."""
    return {name: engine for name, engine in pipeline.engines.items() if engine.weights_from is not None}
