"""``schedule``: how far generators may be ahead, what happens to samples that are too old, and to those under way."""

from __future__ import annotations

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import EngineSpec, Pipeline, UpdateNode
from dagrl.graph.dag import Graph
from dagrl.graph.offline import is_offline
from dagrl.graph.rollouts import rollouts
from dagrl.graph.streaming import hindrances

_STALENESS: Place = ("schedule", "max_staleness")
_IN_FLIGHT: Place = ("schedule", "in_flight_weight_update")
_STREAM: Place = ("schedule", "stream_update")


def check_staleness(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report what the schedule asks for and cannot have; `graph` is None where columns are not sorted out yet."""
    _warn_of_no_effect(pipeline, findings)
    if pipeline.schedule.max_staleness > 0:
        told = "samples get older, and nothing runs at the same time; give each a group of its own, or set it to 0"
        _warn_of_turns(pipeline, findings, _STALENESS, told)
        _warn_of_bias(pipeline, findings)
    if pipeline.schedule.in_flight_weight_update:
        _check_in_flight(pipeline, findings)
    if pipeline.schedule.stream_update:
        told = "no update begins before the rollout is over; give each a group of its own, or take it out"
        _warn_of_turns(pipeline, findings, _STREAM, told)
        _check_stream(pipeline, graph, findings)


def _warn_of_no_effect(pipeline: Pipeline, findings: Findings) -> None:
    """Warn of what is said about samples or updates that there are not."""
    schedule, depends = pipeline.schedule, [("nodes",), ("engines",)]
    offline = is_offline(pipeline)
    if "stale_samples" in schedule.model_fields_set and schedule.stale_samples != "auto":
        carried = any(rollout.partial_rollout for rollout in rollouts(pipeline).values())
        if offline or (schedule.max_staleness == 0 and not carried):
            why = "nothing is trained on samples" if offline else "with max_staleness 0 no sample is too old"
            message = f"has no effect, as {why}; take it out"
            findings.warning(("schedule", "stale_samples"), message, depends_on=[*depends, _STALENESS])
    if schedule.in_flight_weight_update and schedule.max_staleness > 0 and (offline or not _followers(pipeline)):
        message = "has no effect, as no samples of trained weights are trained on; take it out"
        findings.warning(_IN_FLIGHT, message, depends_on=depends)
    if not schedule.in_flight_weight_update:
        _warn_of_pauses(pipeline, findings)
    if schedule.stream_update and not any(isinstance(node, UpdateNode) for node in pipeline.nodes.values()):
        message = "has no effect, as it is for `op: update`, and no node is one; take it out"
        findings.warning(_STREAM, message, depends_on=depends)


def _warn_of_pauses(pipeline: Pipeline, findings: Findings) -> None:
    for name, follower in _followers(pipeline).items():
        if follower.weight_sync.pause != "abort":
            message = (
                "has no effect, as new weights come when no response is under way; add `schedule: {max_staleness: 1, "
                "in_flight_weight_update: true}`, or take it out"
            )
            findings.warning(("engines", name, "weight_sync", "pause"), message, depends_on=[("schedule",)])


def _warn_of_turns(pipeline: Pipeline, findings: Findings, place: Place, told: str) -> None:
    for name, follower in _followers(pipeline).items():
        trainer = pipeline.engines.get(follower.weights_from or "")
        if trainer is not None and trainer.group == follower.group:
            message = f"`{name}` and `{follower.weights_from}` take turns on group `{follower.group}`: {told}"
            findings.warning(place, message, depends_on=[("engines",), ("groups",)])


def _warn_of_bias(pipeline: Pipeline, findings: Findings) -> None:
    for name, node in pipeline.nodes.items():
        if not isinstance(node, UpdateNode) or node.loss.policy == "opmd":
            continue  # Mirror descent in its simple form does not ask whose a sample is.
        if node.rollout_correction is None and not node.takes_rollout_for_old:
            message = (
                f"`{name}` takes samples of older weights for samples of its own; set `rollout_correction: "
                "{rollout_is: token}` there, or `read: {old_logprob: rollout_logprob}`, which clips against the "
                "weights that sampled"
            )
            findings.warning(_STALENESS, message, depends_on=[("nodes", name)])


def _check_in_flight(pipeline: Pipeline, findings: Findings) -> None:
    if pipeline.schedule.max_staleness == 0:
        message = "has no effect with max_staleness 0: no weights come before a rollout is over; take it out"
        findings.warning(_IN_FLIGHT, message, depends_on=[_STALENESS])
        return
    sampling = {node.engine for node in rollouts(pipeline).values()}
    for name, follower in _followers(pipeline).items():
        if name not in sampling:
            continue  # One that judges alone gets its weights between two runs.
        place: Place = ("engines", name)
        if not follower.updates_in_flight:
            message = (
                f"`{name}`, a {follower.backend} engine, decodes with the weights that it began with; take it out, or "
                "sample with another backend"
            )
            findings.error(_IN_FLIGHT, message, depends_on=[(*place, "backend")])
        elif follower.weight_sync.pause == "abort":
            message = (
                "`pause: abort` would end responses that the step needs; set `weight_sync: {pause: retract}` (they go "
                "on with the new weights) or `in_place` (and with the cache of the old ones)"
            )
            given = "pause" in follower.weight_sync.model_fields_set
            where = (*place, "weight_sync", "pause") if given else _IN_FLIGHT
            findings.error(where, message if given else f"engine `{name}`: {message}", depends_on=[place])


def _check_stream(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    prompts, schedule = pipeline.data.prompts_per_step, pipeline.schedule
    if schedule.max_staleness > 0 and not schedule.in_flight_weight_update:
        message = (
            "a rollout that ends in the midst of an update waits until it is over, for till then its weights are "
            "nobody's; add `in_flight_weight_update: true`, or take it out"
        )
        findings.warning(_STREAM, message, depends_on=[_STALENESS, _IN_FLIGHT])
    for name, node in pipeline.nodes.items():
        if not isinstance(node, UpdateNode):
            continue
        depends: list[Place] = [("nodes",), ("data", "prompts_per_step"), ("schedule", "shards_per_step")]
        if node.optimizer_steps(prompts) == 1:
            message = (
                f"has no effect, as `{name}` takes the step as one mini-batch; set `mini_batch` there, or take it out"
            )
            findings.warning(_STREAM, message, depends_on=depends)
        for message in hindrances(pipeline, name, node, graph):
            findings.error(_STREAM, message, depends_on=depends)
            break


def _followers(pipeline: Pipeline) -> dict[str, EngineSpec]:
    """Engines that sample, or judge, with weights that are trained."""
    return {name: engine for name, engine in pipeline.engines.items() if engine.weights_from is not None}
