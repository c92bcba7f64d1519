"""Groups and engines: that they exist, fit each other, and that each node's engine can do what the node asks."""

from __future__ import annotations

from dagrl.config.capability import Capability
from dagrl.config.errors import Place, listed, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import CustomNode, EngineSpec, Pipeline, RolloutNode, TrainingNode
from dagrl.config.schema.backends import engine_sections
from dagrl.graph.op_contracts import contract_of
from dagrl.models.gpus import gpu_named

_HOST = "host"
"""Runs the nodes without an engine; the plan and the timeline call it so."""
_MOST_RANKS = 2**17
"""Ranks of one group. No cluster is larger, and the plan of a larger one fills the memory of the machine."""
_OWN_SECTIONS = (
    *("parallel", "transformer", "optimizer", "lr_schedule", "ddp", "offload"),
    *("model", "head", "bridge", "dist_checkpointing_path", "fused_linear_cross_entropy", "sleep"),
)
"""What an engine on another one's ranks has from that one."""
_VERBS = {
    Capability.GENERATE: "generates",
    Capability.SCORE: "computes log-probs and values",
    Capability.JUDGE: "judges",
    Capability.REPLY: "replies in words",
    Capability.TRAIN: "trains",
}


def check_engines(pipeline: Pipeline, findings: Findings) -> None:
    """Report what is wrong with groups, engines and the nodes' use of them."""
    _check_groups(pipeline, findings)
    _check_use(pipeline, findings)
    _check_trained(pipeline, findings)
    for name, engine in pipeline.engines.items():
        place: Place = ("engines", name)
        if name == _HOST:
            findings.error(place, f"`{name}` is the name of the workers without an engine; choose another name")
        if engine.group is not None and engine.group not in pipeline.groups:
            message = f"there is no group `{engine.group}`; {suggest(engine.group, pipeline.groups)}"
            findings.error((*place, "group"), message, depends_on=[("groups", engine.group)])
        _check_home(pipeline, name, engine, findings)
        _check_weights_from(pipeline, name, engine, findings)
    _warn_of_unused(pipeline, findings)


def trained_by(pipeline: Pipeline) -> dict[str, list[str]]:
    """Engine -> the nodes that train it."""
    trained: dict[str, list[str]] = {}
    for name, node in pipeline.nodes.items():
        if isinstance(node, TrainingNode):
            trained.setdefault(node.engine, []).append(name)
    return trained


def _policies(pipeline: Pipeline) -> list[str]:
    """Engines that are trained and can be followed by generators: critics cannot."""
    trained = [name for name in trained_by(pipeline) if name in pipeline.engines]
    return [name for name in trained if getattr(pipeline.engines[name], "head", "lm") == "lm"]


def _check_groups(pipeline: Pipeline, findings: Findings) -> None:
    for name, group in pipeline.groups.items():
        if bool(group.gpus_per_node) == bool(group.cpus_per_node):
            what = "both gpus_per_node and cpus_per_node" if group.gpus_per_node else "neither GPUs nor CPU slots"
            message = f"the group has {what}; give one of `gpus_per_node:` and `cpus_per_node:`, 1 or more"
            findings.error(("groups", name), message)
        if group.ranks > _MOST_RANKS:
            what = f"the group has {group.ranks} slots, and a process runs on each; give {_MOST_RANKS} or fewer"
            findings.error(("groups", name), what)
        if group.gpu is not None:
            try:
                gpu_named(group.gpu)
            except ValueError as error:
                findings.error(("groups", name, "gpu"), str(error))


def _check_home(pipeline: Pipeline, name: str, engine: EngineSpec, findings: Findings) -> None:
    place: Place = ("engines", name)
    if engine.frozen_copy_of is None:
        if engine.group is None:
            message = (
                "the engine has no place to run; add `group:`, or `frozen_copy_of:` to live on another engine's ranks"
            )
            findings.error(place, message)
        return
    if engine.group is not None:
        findings.error((*place, "frozen_copy_of"), "the engine has `group` and `frozen_copy_of`; take one of them out")
    key: Place = (*place, "frozen_copy_of")
    owner = pipeline.engines.get(engine.frozen_copy_of)
    candidates = [
        other
        for other, spec in pipeline.engines.items()
        if spec.holds_frozen_copies and spec.frozen_copy_of is None and other != name
    ]
    if engine.frozen_copy_of == name:
        findings.error(key, f"an engine cannot share its own ranks; {suggest(name, candidates)}")
    elif owner is None:
        message = f"there is no engine `{engine.frozen_copy_of}`; {suggest(engine.frozen_copy_of, candidates)}"
        findings.error(key, message, depends_on=[("engines", engine.frozen_copy_of)])
    elif not owner.holds_frozen_copies or owner.backend != engine.backend:
        message = f"a {engine.backend} engine cannot be a copy of `{engine.frozen_copy_of}`, a {owner.backend} engine"
        message += f"; name one of {listed(candidates)}" if candidates else "; add `group:` instead"
        findings.error(key, message)
    elif owner.frozen_copy_of is not None:
        findings.error(
            key, f"`{engine.frozen_copy_of}` shares `{owner.frozen_copy_of}` itself; name an engine with a group"
        )
    else:
        for section in _OWN_SECTIONS:
            if section in engine.model_fields_set and getattr(engine, section) != getattr(owner, section):
                message = (
                    f"differs from that of `{engine.frozen_copy_of}`, whose model this engine is; take `{section}` out"
                )
                findings.error((*place, section), message, depends_on=[("engines", engine.frozen_copy_of, section)])


def _check_weights_from(pipeline: Pipeline, name: str, engine: EngineSpec, findings: Findings) -> None:
    if engine.weights_from is None:
        return
    place: Place = ("engines", name, "weights_from")
    if not engine.generates or engine.head != "lm":
        message = f"a {engine.backend} engine with head {engine.head} takes no weights from another; take it out"
        findings.error(place, message, depends_on=[("engines", name, "head")])
        return
    if engine.model is not None:
        message = f"weights of `{engine.weights_from}` come to it, and so its model is that one's; take `model` out"
        findings.error(("engines", name, "model"), message, depends_on=[place])
    trained = _policies(pipeline)
    if engine.weights_from not in pipeline.engines:
        message = (
            f"there is no engine `{engine.weights_from}`; {suggest(engine.weights_from, trained or pipeline.engines)}"
        )
        findings.error(place, message, depends_on=[("engines", engine.weights_from)])
    elif Capability.TRAIN not in pipeline.engines[engine.weights_from].capabilities:
        backend = pipeline.engines[engine.weights_from].backend
        remedy = f"follow {listed(trained)}" if trained else "name an engine that an update node trains"
        findings.error(place, f"`{engine.weights_from}` is a {backend} engine, which is never trained; {remedy}")
    elif engine.weights_from not in trained_by(pipeline):
        remedy = (
            f"follow {listed(trained)}" if trained else f"add a node `{{op: update, engine: {engine.weights_from}}}`"
        )
        message = f"no update node trains `{engine.weights_from}`, so there is nothing to follow; {remedy}"
        updates = [update for names in trained_by(pipeline).values() for update in names]
        findings.error(place, message, depends_on=[("nodes", update, "engine") for update in updates])


def _check_use(pipeline: Pipeline, findings: Findings) -> None:
    for name, node in pipeline.nodes.items():
        engine_name = getattr(node, "engine", None)
        if engine_name is None or isinstance(node, CustomNode):
            continue
        need = contract_of(node).needs
        assert need is not None, f"op {node.op} has an engine and asks nothing of it"
        place: Place = ("nodes", name, "engine")
        able = [other for other, spec in pipeline.engines.items() if need in spec.capabilities]
        engine = pipeline.engines.get(engine_name)
        if engine is None:
            message = f"there is no engine `{engine_name}`; {suggest(engine_name, able or pipeline.engines)}"
            findings.error(place, message, depends_on=[("engines", engine_name)])
        elif engine_name not in able:
            backends = [name for name, section in engine_sections().items() if need in section.capabilities]
            remedy = f"take {' or '.join(f'`{other}`' for other in able)}" if able else "add one that does"
            fact = f"`{engine_name}` is a {engine.backend} engine, and only {' or '.join(backends)} {_VERBS[need]}"
            message = f"{fact}; {remedy}"
            findings.error(place, message)


def _check_trained(pipeline: Pipeline, findings: Findings) -> None:
    for engine_name, updates in trained_by(pipeline).items():
        for update in updates[1:]:
            message = f"`{engine_name}` is trained by `{updates[0]}` already; keep one node that trains it"
            findings.error(("nodes", update, "engine"), message)
        engine = pipeline.engines.get(engine_name)
        if engine is not None and engine.frozen_copy_of is not None:
            message = (
                f"`{engine_name}` is the frozen start of `{engine.frozen_copy_of}`; train `{engine.frozen_copy_of}`"
            )
            findings.error(("nodes", updates[0], "engine"), message)


def _warn_of_unused(pipeline: Pipeline, findings: Findings) -> None:
    homes = {engine.group for engine in pipeline.engines.values()}
    for name in pipeline.groups:
        if name not in homes:
            message = "no engine runs on the group; take it out, or name it in an engine"
            findings.warning(("groups", name), message, depends_on=[("engines",)])
    used = {getattr(node, "engine", None) for node in pipeline.nodes.values()}
    for name in pipeline.engines:
        if name not in used:
            message = "no node uses the engine; take it out, or name it in a node"
            findings.warning(("engines", name), message, depends_on=[("nodes",)])
    if not (trained := _policies(pipeline)):
        return
    for node in pipeline.nodes.values():
        if not isinstance(node, RolloutNode):
            continue
        engine = pipeline.engines.get(node.engine)
        if engine is not None and engine.generates and engine.weights_from is None and engine.model is None:
            message = "samples come from the start weights for ever; to sample from what is trained, "
            findings.warning(("engines", node.engine), f"{message}say `weights_from: {trained[0]}`")
