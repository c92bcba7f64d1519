"""The nearest change to a pipeline that makes it fit: found by trying, the ones that cost least first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.backends.sglang.layout import gpus_per_server
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.errors import Place, dotted
from dagrl.config.schema import DpoNode, GroupSpec, NodeBase, PackingNode, Pipeline, UpdateNode
from dagrl.graph.dag import Graph
from dagrl.graph.offline import longest_row
from dagrl.graph.rollouts import leading_rollout, rollouts
from dagrl.planner.fitting.fit import Fit, fit
from dagrl.planner.hardware import GPUS_OF_MACHINE
from dagrl.scheduler.placement import guests_of

_MOST_TOGETHER = 2
"""Changes that are tried in all their combinations; more than that one after the other, the best first."""
_MOST_IN_A_ROW = 10
_MOST_CHECKED = 20
"""Changes that fit and are held against all checks of a file, which takes longer."""
_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_WIDEST_SERVER = 32
"""GPUs: beyond a machine's only where nothing less does."""
_MOST_MACHINES = 128


@dataclass(frozen=True, slots=True)
class Change:
    """Values to set in a pipeline."""

    values: Mapping[Place, Any]

    def overrides(self) -> list[str]:
        """As the command line takes them: ``engines.actor.offload.optimizer=true``."""
        return [f"{dotted(place)}={_yaml(value)}" for place, value in self.values.items()]


def nearest_change(
    pipeline: Pipeline,
    graph: Graph,
    found: Fit,
    *,
    gpu: str,
    is_valid: Callable[[Change], bool] = lambda change: True,
) -> Change | None:
    """What to change so that all fits, as little as can be; None where nothing that is tried does.

    `is_valid` has the last word on a change: whether the file would still pass its checks.
    """
    if not found.problems:
        return None
    nearest = Change({})
    # Groups have no GPU in common, so that each is helped by itself.
    for group in sorted({problem.group for problem in found.problems}):
        attempts = itertools.islice(_attempts(pipeline, graph, found, group, gpu), _MOST_CHECKED)
        valid = (both for change in attempts if is_valid(both := _joined([nearest, change])))
        if (helped := next(valid, None)) is None:
            return None
        nearest = helped
    return nearest


def _attempts(pipeline: Pipeline, graph: Graph, found: Fit, group: str, gpu: str) -> Iterator[Change]:
    """Changes with which all fits that is on a group, the nearest first."""
    (engines,) = ([tenant.name for tenant in each.tenants] for each in found.groups if each.name == group)

    def ladders(room: Callable[[GroupSpec], _Room]) -> list[list[Change]]:
        return [ladder for name in engines for ladder in _ladders(pipeline, name, found.shape, room)]

    def resized(room: Callable[[GroupSpec], _Room]) -> list[list[Change]]:
        return [ladder for name in engines for ladder in _resized_servers(pipeline, name, room)]

    def over(change: Change) -> int | None:
        return _over(pipeline, graph, change, group, gpu, found.shape)

    here, anywhere = _Room.of, _Room.at_most
    yield from (change for change in _together(ladders(here)) if over(change) == 0)
    yield from _in_a_row(Change({}), [*ladders(here), *resized(here)], over)
    for more in _more_gpus(pipeline, group):
        yield from _in_a_row(more, [*ladders(anywhere), *resized(anywhere)], over)


def changed(pipeline: Pipeline, change: Change) -> Pipeline:
    """The pipeline with the change in it. ValueError (pydantic's) where it takes no such value."""
    tree = pipeline.model_dump(exclude_unset=True)
    for place, value in change.values.items():
        inner: dict[Any, Any] = tree
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = value
    return Pipeline.model_validate(tree)


@dataclass(frozen=True, slots=True)
class _Room:
    """How far a model can be split."""

    in_machine: int
    ranks: int

    @staticmethod
    def of(group: GroupSpec) -> _Room:
        """Over the GPUs that a group has."""
        return _Room(group.gpus_per_node, group.ranks)

    @staticmethod
    def at_most(group: GroupSpec) -> _Room:
        """Over those that it could have."""
        return _Room(max(group.gpus_per_node, GPUS_OF_MACHINE), GPUS_OF_MACHINE * _MOST_MACHINES)


def _over(pipeline: Pipeline, graph: Graph, change: Change, group: str, gpu: str, shape: ModelShape) -> int | None:
    """Bytes that a group lacks with the change; None where a layout does not divide ranks, machines or layers."""
    try:
        wanted = changed(pipeline, change)
        if _breaks_machines(wanted):
            return None
        (found,) = (each for each in fit(wanted, graph, gpu=gpu, shape=shape).groups if each.name == group)
        return found.over
    except (ValueError, AssertionError):
        return None


def _breaks_machines(pipeline: Pipeline) -> bool:
    """Whether what has to be on one machine would be on parts of several; `dagrl.validation` says it in words.

    Asked here too, as all that is tried after such a layout would be in vain.
    """
    for engine in pipeline.engines.values():
        group = pipeline.groups.get(engine.group or "")
        if group is None or group.nodes == 1:
            continue
        each = group.gpus_per_node or group.cpus_per_node
        if isinstance(engine, MegatronEngineSpec) and each % engine.parallel.tensor_model_parallel_size:
            return True
        if isinstance(engine, SglangEngineSpec) and each % (size := gpus_per_server(engine.server)) and size % each:
            return True
    return False


def _in_a_row(first: Change, ladders: list[list[Change]], over: Callable[[Change], int | None]) -> Iterator[Change]:
    """Beside the `first`, the rung that helps most, and so on, until all fits; less what was not needed in the end."""
    steps: list[tuple[int, Change]] = []

    def with_all(chosen: list[tuple[int, Change]]) -> Change:
        return _joined([first, *(rung for _, rung in chosen)])

    missing = over(first)
    while missing != 0 and len(steps) < _MOST_IN_A_ROW:
        tried = [(over(with_all([*steps, (i, rung)])), i, rung) for i, ladder in enumerate(ladders) for rung in ladder]
        better = [
            (left, i, rung) for left, i, rung in tried if left is not None and (missing is None or left < missing)
        ]
        if not better:
            return
        # The first of the best: ladders stand in the order of what they cost.
        missing, index, rung = min(better, key=lambda found: found[0])
        steps.append((index, rung))
    if missing == 0:
        yield with_all(_less(steps, ladders, lambda fewer: over(with_all(fewer)) == 0))


def _less(
    steps: list[tuple[int, Change]], ladders: list[list[Change]], fits: Callable[[list[tuple[int, Change]]], bool]
) -> list[tuple[int, Change]]:
    """Without the steps that are not needed, and on the lowest rungs that do, the dearest ladders first."""
    for step in sorted(steps, key=lambda step: -step[0]):
        at = steps.index(step)
        lower = ladders[step[0]][: ladders[step[0]].index(step[1])]
        replaced = ([*steps[:at], (step[0], rung), *steps[at + 1 :]] for rung in lower)
        steps = next(filter(fits, ([*steps[:at], *steps[at + 1 :]], *replaced)), steps)
    return steps


def _joined(changes: list[Change]) -> Change:
    return Change({place: value for change in changes for place, value in change.values.items()})


def _together(ladders: list[list[Change]]) -> Iterator[Change]:
    """One change, then two, and so on; of one ladder at most one rung, lower ones first."""
    for count in range(1, _MOST_TOGETHER + 1):
        chosen = []
        for some in itertools.combinations(range(len(ladders)), count):
            for rungs in itertools.product(*(range(len(ladders[index])) for index in some)):
                # As few steps up as possible, then the ladders in their order.
                chosen.append((sum(rungs), some, rungs))
        for _, some, rungs in sorted(chosen):
            yield _joined([ladders[index][rung] for index, rung in zip(some, rungs, strict=True)])


def _ladders(
    pipeline: Pipeline, name: str, shape: ModelShape, room: Callable[[GroupSpec], _Room]
) -> Iterator[list[Change]]:
    """Ways to make an engine take less, each with its rungs; those that cost least time come first."""
    match pipeline.engines[name]:
        case MegatronEngineSpec() as engine:
            space = room(pipeline.groups[engine.group or ""])
            ladders = _trainer_ladders(pipeline, name, engine, engine_shape(pipeline, name, shape), space)
        case SglangEngineSpec() as engine:
            ladders = _server_ladders(name, engine, room(pipeline.groups[str(engine.group)]))
        case _:
            return
    yield from (ladder for ladder in ladders if ladder)


def _trainer_ladders(
    pipeline: Pipeline, name: str, engine: MegatronEngineSpec, shape: ModelShape, room: _Room
) -> Iterator[list[Change]]:
    own: Place = ("engines", name)
    sizes = engine.parallel
    if engine.sleep is False:
        yield [Change({(*own, "sleep"): "auto"})]
    elif engine.keep_communicators:
        yield [Change({(*own, "keep_communicators"): False})]
    for each in (name, *guests_of(name, pipeline)):
        yield _smaller_micro_batches(pipeline, each)
    if engine.transformer.get("recompute_granularity") != "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield [Change({(*own, "transformer", field): value for field, value in full.items()})]
    if not engine.fused_linear_cross_entropy and engine.head == "lm":
        yield [Change({(*own, "fused_linear_cross_entropy"): True})]
    tensor: list[Change] = []
    for size in _doubled(sizes.tensor_model_parallel_size, room.in_machine):
        parallel = (*own, "parallel")
        split = {(*parallel, "tensor_model_parallel_size"): size, (*parallel, "sequence_parallel"): True}
        tensor.append(Change(split))
    yield tensor
    if sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield [Change({(*own, "parallel", "sequence_parallel"): True})]
    stages = _doubled(sizes.pipeline_model_parallel_size, room.ranks)
    yield [Change({(*own, "parallel", "pipeline_model_parallel_size"): size}) for size in stages]
    if shape.experts is not None:
        experts = _doubled(sizes.expert_model_parallel_size, min(room.ranks, shape.experts.count))
        yield [Change({(*own, "parallel", "expert_model_parallel_size"): size}) for size in experts]
    away = [Change({(*own, "offload", "optimizer"): True})] if not engine.offload.optimizer else []
    if not engine.optimizer.get("optimizer_cpu_offload"):
        away.append(Change({(*own, "optimizer", "optimizer_cpu_offload"): True}))
    yield away


def _server_ladders(name: str, engine: SglangEngineSpec, room: _Room) -> Iterator[list[Change]]:
    own: Place = ("engines", name)
    if engine.sleep is False:
        yield [Change({(*own, "sleep"): "auto"})]
    given = engine.server.get("mem_fraction_static")
    near = sorted(_FRACTIONS, key=lambda fraction: abs(fraction - float(given or 0.9)))
    yield [Change({(*own, "server", "mem_fraction_static"): each}) for each in near if each != given]
    wider = _doubled(int(engine.server.get("tp_size", 1)), min(room.ranks, _WIDEST_SERVER))
    yield [Change({(*own, "server", "tp_size"): size}) for size in wider]


def _resized_servers(pipeline: Pipeline, name: str, room: Callable[[GroupSpec], _Room]) -> Iterator[list[Change]]:
    """A server of more GPUs that takes another share of each: where its weights fill one, either alone is no help."""
    engine = pipeline.engines[name]
    if isinstance(engine, SglangEngineSpec):
        *_, fractions, sizes = _server_ladders(name, engine, room(pipeline.groups[str(engine.group)]))
        if sizes:
            yield [_joined([size, fraction]) for size, fraction in itertools.product(sizes, fractions)]


def _more_gpus(pipeline: Pipeline, name: str) -> list[Change]:
    """Twice as many GPUs, and twice that: on the group's machines first, up to a whole one, then on more of them."""
    group = pipeline.groups[name]
    own: Place = ("groups", name, "gpus_per_node")
    per_node = sorted({*_doubled(group.gpus_per_node, GPUS_OF_MACHINE), GPUS_OF_MACHINE})
    fuller = [Change({own: each}) for each in per_node if each > group.gpus_per_node]
    more = (Change({("groups", name, "nodes"): nodes}) for nodes in _doubled(group.nodes, _MOST_MACHINES))
    return [*fuller, *(_joined([*fuller[-1:], each]) for each in more)]


def _smaller_micro_batches(pipeline: Pipeline, name: str) -> list[Change]:
    """At most half of the tokens of the largest, and half of that, while the longest sample still goes in."""
    nodes = {
        node: spec for node, spec in pipeline.nodes.items() if isinstance(spec, PackingNode) and spec.engine == name
    }
    least = {node: _rows_together(pipeline, spec) * longest_row(pipeline) for node, spec in nodes.items()}
    largest = max((spec.tokens_per_micro_batch for spec in nodes.values()), default=0)
    rungs: list[Change] = []
    smaller: dict[Place, int] = {}
    for most in (largest >> shift for shift in range(1, 5)):
        cut = [node for node, spec in nodes.items() if spec.tokens_per_micro_batch > most >= least[node]]
        if cut:
            # Those that go no lower stay as low as they are.
            smaller |= {("nodes", node, "tokens_per_micro_batch"): most for node in cut}
            rungs.append(Change(dict(smaller)))
    return rungs


def _rows_together(pipeline: Pipeline, node: NodeBase) -> int:
    """Rows that must go into one micro-batch: those of a pair, or of a prompt where a loss compares them."""
    if isinstance(node, DpoNode):
        return 2
    compares = isinstance(node, UpdateNode) and node.loss.policy == "opmd_pairwise"
    return rollouts(pipeline)[leading_rollout(pipeline)].n if compares else 1


def _doubled(size: int, most: int) -> Iterator[int]:
    while (size := 2 * size) <= most:
        yield size


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
