"""Checks of groups and engines: existence, consistency, and the capabilities that nodes need."""

from __future__ import annotations

from dagrl.backends.planning.gpus import gpu_named
from dagrl.config.capability import Capability
from dagrl.config.errors import Place, listed, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import CustomNode, EngineSpec, GroupSpec, Pipeline, RolloutNode, TrainingNode
from dagrl.config.schema.backends import engine_sections

_HOST = "host"
"""The name of the workers for nodes without an engine, in the plan and the timeline."""
_SHARED_SECTIONS = (
    *("parallel", "transformer", "optimizer", "lr_schedule", "ddp", "offload"),
    *("model", "head", "dist_checkpointing_path", "fused_linear_cross_entropy", "sleep"),
)
"""Sections that a frozen copy takes from its original engine."""
_HEADS = {"lm": "the language model's", "value": "a critic's", "reward": "a reward model's"}
_HEADS_OF_OPS = {"values": "value", "critic": "value", "reward_model": "reward"}
"""Ops that need a head other than the language model's."""
_VERBS = {
    Capability.GENERATE: "generates",
    Capability.SCORE: "computes log-probs and values",
    Capability.JUDGE: "judges",
    Capability.REPLY: "replies in words",
    Capability.TRAIN: "trains",
}


def check_engines(pipeline: Pipeline, findings: Findings) -> None:
    """Report wrong groups and engines, and nodes with the wrong engine."""
    _check_groups(pipeline, findings)
    _check_use(pipeline, findings)
    _check_trained(pipeline, findings)
    for name, engine in pipeline.engines.items():
        place: Place = ("engines", name)
        if name == _HOST:
            message = f"`{name}` is the name of the workers without an engine; choose another name"
            findings.error(place, message, "reserved-name")
        if engine.group is not None and engine.group not in pipeline.groups:
            findings.unknown((*place, "group"), "group", engine.group, pipeline.groups)
        _check_frozen_copy(pipeline, name, engine, findings)
        if engine.weights_from is not None:
            _check_weights_from(pipeline, name, engine, engine.weights_from, findings)
            where = (*place, "weights_from")
            _check_head(pipeline, engine.weights_from, "lm", where, "a generator needs", findings)
    for name, node in pipeline.nodes.items():
        if (engine_name := getattr(node, "engine", None)) is not None:
            op = str(node.op)
            needed = _HEADS_OF_OPS.get(op, "lm")
            _check_head(pipeline, engine_name, needed, ("nodes", name, "engine"), f"op {op} needs", findings)
    _warn_of_unused(pipeline, findings)


def _trained_by(pipeline: Pipeline) -> dict[str, list[str]]:
    """Engine -> the nodes that train it."""
    trained: dict[str, list[str]] = {}
    for name, node in pipeline.nodes.items():
        if isinstance(node, TrainingNode):
            trained.setdefault(node.engine, []).append(name)
    return trained


def _policies(pipeline: Pipeline) -> list[str]:
    """Trained engines that can send weights to generators; critics cannot."""
    engines = pipeline.engines
    return [name for name in _trained_by(pipeline) if name in engines and engines[name].head == "lm"]


def _check_groups(pipeline: Pipeline, findings: Findings) -> None:
    for name, group in pipeline.groups.items():
        place: Place = ("groups", name)
        if bool(group.gpus_per_node) == bool(group.cpus_per_node):
            what = "both gpus_per_node and cpus_per_node" if group.gpus_per_node else "neither GPUs nor CPU slots"
            message = f"the group has {what}; set one of `gpus_per_node:` and `cpus_per_node:`, 1 or more"
            findings.error(place, message, "group-without-slots")
        if group.min_nodes is not None:
            _check_elastic(pipeline, name, group, findings)
        if group.gpu is not None:
            with findings.reporting((*place, "gpu"), "unknown-gpu"):
                gpu_named(group.gpu)


def _check_elastic(pipeline: Pipeline, name: str, group: GroupSpec, findings: Findings) -> None:
    place: Place = ("groups", name, "min_nodes")
    if group.min_nodes is not None and group.min_nodes > group.nodes:
        message = f"it is above `nodes`, {group.nodes}; raise `nodes`, the most machines of the group"
        findings.error(place, message, "min-above-most")
    engines = {key: engine for key, engine in pipeline.engines.items() if engine.group == name}
    generators = [key for key, engine in engines.items() if engine.weights_from is not None]
    if len(generators) != 1 or len(engines) != 1:
        message = removal("only a single engine with `weights_from` can lose and gain machines during a run")
        findings.error(place, message, "not-elastic", depends_on=[("engines",)])


def _check_frozen_copy(pipeline: Pipeline, name: str, engine: EngineSpec, findings: Findings) -> None:
    place: Place = ("engines", name)
    original = engine.frozen_copy_of
    if original is None:
        if engine.moving_average is not None:
            message = removal("is of another engine's weights", "name that in `frozen_copy_of:`", key="moving_average")
            findings.error((*place, "moving_average"), message, "average-of-nothing", depends_on=[place])
        if engine.group is None:
            message = "the engine has no ranks; add `group:`, or `frozen_copy_of:` to use another engine's ranks"
            findings.error(place, message, "engine-without-group")
        return
    key: Place = (*place, "frozen_copy_of")
    owner = pipeline.engines.get(original)
    candidates = [
        other
        for other, spec in pipeline.engines.items()
        if spec.holds_frozen_copies and spec.frozen_copy_of is None and other != name
    ]
    if engine.group is not None:
        findings.error(key, "the engine has `group` and `frozen_copy_of`; remove one of them", "two-groups")
    if original == name:
        message = f"an engine cannot be a copy of itself; {suggest(name, candidates)}"
        findings.error(key, message, "no-frozen-copy")
    elif owner is None:
        findings.unknown(key, "engine", original, candidates)
    elif not owner.holds_frozen_copies or owner.backend != engine.backend:
        message = f"a {engine.backend} engine cannot be a copy of `{original}`, a {owner.backend} engine"
        remedy = f"name one of {listed(candidates)}" if candidates else "add `group:` instead"
        findings.error(key, f"{message}; {remedy}", "no-frozen-copy")
    elif owner.frozen_copy_of is not None:
        message = f"`{original}` is itself a copy, of `{owner.frozen_copy_of}`; name an engine with a group"
        findings.error(key, message, "no-frozen-copy")
    else:
        if engine.moving_average is not None:
            _check_moving_average(pipeline, name, original, findings)
        for section in _SHARED_SECTIONS:
            if section in engine.model_fields_set and getattr(engine, section) != getattr(owner, section):
                message = removal(f"differs from that of `{original}`, whose model it copies", key=section)
                findings.error((*place, section), message, "copy-differs")


def _check_moving_average(pipeline: Pipeline, name: str, original: str, findings: Findings) -> None:
    place: Place = ("engines", name, "moving_average")
    if original not in _trained_by(pipeline) and not pipeline.run.only_validates:
        message = removal(f"no node trains `{original}`, so the average would be its start weights")
        findings.error(place, message, "average-of-nothing", depends_on=[("nodes",)])
    others = (each for each, spec in pipeline.engines.items() if spec.frozen_copy_of == original)
    first = next(other for other in others if pipeline.engines[other].moving_average is not None)
    if first != name:
        message = removal(
            f"`{first}` is the moving average of `{original}`, which has one; use that engine in the nodes"
        )
        findings.error(place, message, "several-averages", depends_on=[("engines", first)])


def _check_weights_from(pipeline: Pipeline, name: str, engine: EngineSpec, source: str, findings: Findings) -> None:
    place: Place = ("engines", name, "weights_from")
    if not engine.generates or engine.head != "lm":
        message = removal(f"a {engine.backend} engine with head {engine.head} takes no weights from another")
        findings.error(place, message, "takes-no-weights")
        return
    if engine.model is not None:
        message = removal(f"its weights come from `{source}`, and so does its model", key="model")
        findings.error(("engines", name, "model"), message, "model-of-another")
    trained = _policies(pipeline)
    remedy = f"use {listed(trained)}" if trained else f"add a node `{{op: update, engine: {source}}}`"
    if source not in pipeline.engines:
        findings.unknown(place, "engine", source, trained or pipeline.engines)
    elif Capability.TRAIN not in pipeline.engines[source].capabilities:
        backend = pipeline.engines[source].backend
        remedy = remedy if trained else "name an engine that an update node trains"
        message = f"`{source}` is a {backend} engine, which is never trained; {remedy}"
        findings.error(place, message, "untrained-source")
    elif source not in _trained_by(pipeline):
        updates = [update for names in _trained_by(pipeline).values() for update in names]
        message = f"no update node trains `{source}`, so its weights never change; {remedy}"
        depends: list[Place] = [("nodes", update, "engine") for update in updates]
        findings.error(place, message, "untrained-source", depends_on=depends)
    elif pipeline.engines[source].sent_adapter and not engine.takes_adapters:
        able = [key for key, section in engine_sections().items() if section.takes_adapters]
        message = f"`{source}` sends its adapters alone, which {engine.backend} does not take; let it merge them"
        message += f", or use {' or '.join(able)}" if able else ""
        findings.error(place, message, "takes-no-adapters", depends_on=[("engines", source)])


def _check_use(pipeline: Pipeline, findings: Findings) -> None:
    for name, node in pipeline.nodes.items():
        engine_name = getattr(node, "engine", None)
        if engine_name is None or isinstance(node, CustomNode):
            continue
        need = node.contract().needs
        assert need is not None, f"op {node.op} has an engine and asks nothing of it"
        place: Place = ("nodes", name, "engine")
        able = [other for other, spec in pipeline.engines.items() if need in spec.capabilities]
        engine = pipeline.engines.get(engine_name)
        if engine is None:
            findings.unknown(place, "engine", engine_name, able or pipeline.engines)
        elif engine_name not in able:
            backends = [key for key, section in engine_sections().items() if need in section.capabilities]
            remedy = f"use {' or '.join(f'`{other}`' for other in able)}" if able else "add such an engine"
            fact = f"`{engine_name}` is a {engine.backend} engine, and only {' or '.join(backends)} {_VERBS[need]}"
            findings.error(place, f"{fact}; {remedy}", "wrong-backend")


def _check_trained(pipeline: Pipeline, findings: Findings) -> None:
    for engine_name, updates in _trained_by(pipeline).items():
        for update in updates[1:]:
            message = f"`{updates[0]}` already trains `{engine_name}`; keep one node that trains it"
            findings.error(("nodes", update, "engine"), message, "trained-twice")
        engine = pipeline.engines.get(engine_name)
        if engine is not None and (original := engine.frozen_copy_of) is not None:
            message = f"`{engine_name}` is a frozen copy of `{original}`; train `{original}`"
            findings.error(("nodes", updates[0], "engine"), message, "trains-frozen-copy")


def _check_head(pipeline: Pipeline, name: str, needed: str, place: Place, who: str, findings: Findings) -> None:
    engine = pipeline.engines.get(name)
    if engine is not None and engine.frozen_copy_of is not None:
        engine = pipeline.engines.get(engine.frozen_copy_of)
    if engine is not None and engine.head != needed:
        head = "the language model's head" if engine.head == "lm" else f"a {engine.head} head"
        message = f"`{name}` has {head}, and {who} {_HEADS[needed]}; name an engine with `head: {needed}`"
        findings.error(place, message, "wrong-head", depends_on=[place])


def _warn_of_unused(pipeline: Pipeline, findings: Findings) -> None:
    homes = {engine.group for engine in pipeline.engines.values()}
    for name in pipeline.groups:
        if name not in homes:
            message = removal("no engine runs on the group", "name it in an engine")
            findings.warning(("groups", name), message, "unused-group", depends_on=[("engines",)])
    used = {getattr(node, "engine", None) for node in pipeline.nodes.values()}
    for name in pipeline.engines:
        if name not in used:
            message = removal("no node uses the engine", "name it in a node")
            findings.warning(("engines", name), message, "unused-engine", depends_on=[("nodes",)])
    trained = _policies(pipeline)
    samplers = {node.engine for node in pipeline.nodes.values() if isinstance(node, RolloutNode)}
    for name, engine in pipeline.engines.items():
        if name in samplers and trained and engine.generates and engine.weights_from is engine.model is None:
            message = f"samples always come from the start weights; set `weights_from: {trained[0]}` to train on-policy"
            findings.warning(("engines", name), message, "stale-generator")
