"""The search: for every placing the fastest trainers and servers that fit, then all of them by the simulated step.

Trainers and servers are looked at apart first, for thousands of layouts: what their tasks take, and whether they fit
beside a sleeper. What is left is put together, must fit as a whole, and is simulated; the best are held against the
checks of ``dagrl validate``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product
from pathlib import Path

from dagrl.backends.families.registry import engine_shape, model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import GroupSpec, Pipeline, Section, TrainingNode
from dagrl.graph.offline import is_offline, longest_row, rows_per_prompt
from dagrl.graph.op_contracts import Scope
from dagrl.graph.plugins.isolation import isolated_imports
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import StepEstimate, estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.fitting.fit import fit
from dagrl.planner.fitting.sleep_policy import ROOM, with_sleep_decided
from dagrl.planner.hardware import DEFAULT_GPU, Gpu, gpu_of_group
from dagrl.planner.memory.engines import engine_memory
from dagrl.planner.search.choices import RECOMPUTE, Placing, ServerChoice, TrainerChoice
from dagrl.planner.search.space import Cluster, budgets, layouts, placings, servers
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Plan, Rows
from dagrl.validation import CheckedPipeline, check_file

_ASSUMED = Assumed()
_KEPT_TRAINERS = 5
_KEPT_SERVERS = 2
"""Of each placing, for the simulation: layouts, and sizes of servers."""
_ABOUT_AS_FAST = 1.05
_OF_SLEEPERS = 4 << 30
"""Bytes that those who sleep beside a trainer keep, with some to spare; the whole is asked later."""
_OF_ONE_PLACING = 2
"""Proposals of one placing that are shown before any further, so that there is a choice."""
_ANY_TRAINER, _ANY_SERVER = TrainerChoice(ParallelSpec()), ServerChoice(1, 0.8)
_WAYS_TO_FIT = tuple(product((False, True), RECOMPUTE))
"""Optimizer offloaded, and what is recomputed: from the fastest on."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Choices that fit together."""

    placing: Placing
    trainer: TrainerChoice
    server: ServerChoice | None
    """None where nothing is sampled."""
    estimate: StepEstimate
    overrides: tuple[str, ...]
    """What makes the user's pipeline this one."""


@isolated_imports()
def search(
    path: Path,
    overrides: Sequence[str],
    cluster: Cluster,
    *,
    gpu: str = DEFAULT_GPU,
    assumed: Assumed = _ASSUMED,
    top: int = 5,
) -> list[Proposal]:
    """The `top` proposals for a pipeline file on a cluster, fastest step first; none where nothing fits. `gpu` is what
    the cluster has where it does not say. PipelineError for a file that is wrong, ValueError for a pipeline that a
    search cannot change.
    """
    checked = check_file(path, overrides, with_files=False)
    pipeline = checked.loaded.pipeline
    _refuse(pipeline)
    seeker = _Seeker(path, overrides, checked, model_shape(pipeline.model), gpu, assumed)
    found: list[Proposal] = []
    others: list[Proposal] = []
    for proposal in sorted(seeker.proposals(cluster), key=_seconds_per_token):
        if len(found) == top:
            break
        alike = [each for each in found if each.placing == proposal.placing]
        told = [*alike, *(each for each in others if each.placing == proposal.placing)]
        if any(_kind(each) == _kind(proposal) for each in told):
            continue
        if len(alike) == _OF_ONE_PLACING:
            others.append(proposal)
        elif _passes(path, overrides, proposal):
            found.append(proposal)
    spare = (proposal for proposal in others if _passes(path, overrides, proposal))
    return sorted([*found, *islice(spare, top - len(found))], key=_seconds_per_token)


def _kind(proposal: Proposal) -> tuple[TrainerChoice, int | None]:
    """Proposals that differ in a server's share of memory alone are one for those who choose."""
    return proposal.trainer, proposal.server.tp_size if proposal.server else None


def _seconds_per_token(proposal: Proposal) -> float:
    """In the order of the steps, unless ``prompts_per_node`` makes larger steps of more machines that train."""
    return proposal.estimate.step_s / proposal.estimate.response_tokens


def _refuse(pipeline: Pipeline) -> None:
    for name, engine in pipeline.engines.items():
        if isinstance(engine, HfEngineSpec):
            raise ValueError(f"engine `{name}` has the backend hf, which has no layout to search for; choose sglang")
    if not any(isinstance(node, TrainingNode) for node in pipeline.nodes.values()):
        raise ValueError("nothing is trained, and layouts are ranked by steps of training; add a node that trains")


def _passes(path: Path, overrides: Sequence[str], proposal: Proposal) -> bool:
    try:
        check_file(path, [*overrides, *proposal.overrides], with_files=False)
    except PipelineError:
        return False
    return True


@dataclass(frozen=True)
class _Seeker:
    """A pipeline, and what its layouts are judged by."""

    path: Path
    overrides: Sequence[str]
    checked: CheckedPipeline
    shape: ModelShape
    gpu: str
    assumed: Assumed

    def proposals(self, cluster: Cluster) -> Iterator[Proposal]:
        """Of every placing, the best combinations of what is best alone."""
        given = self.checked.loaded.pipeline
        # GPUs apart are for those who sample what is trained on.
        for placing in placings(cluster, together=is_offline(given)):
            # On every group any number of ranks can have these; the file's layouts are for its own groups.
            loaded = load_pipeline(self.path, [*self.overrides, *placing.overrides(given)])
            placed = _ANY_SERVER.applied(_ANY_TRAINER.applied(loaded.pipeline))
            generating = self._fastest_servers(placed, placing)
            choices: list[ServerChoice | None] = [*generating] if self._shapes(placed, SglangEngineSpec) else [None]
            training = [
                choice
                for room in self._rooms(placed, placing, generating)
                for choice in self._fastest_trainers(placed, placing, room)
            ]
            for trainer, server in product(dict.fromkeys(training), choices):
                laid_out = trainer.applied(placed)
                laid_out = server.applied(laid_out) if server else laid_out
                pipeline = with_sleep_decided(laid_out, self.checked.graph)
                fitted = fit(pipeline, self.checked.graph, gpu=self.gpu, shape=self.shape)
                if not fitted.problems:
                    of_server = server.overrides(given) if server else ()
                    overrides = (*placing.overrides(given), *trainer.overrides(given), *of_server)
                    estimate = estimate_step(self._costs(pipeline, fitted.plan))
                    yield Proposal(placing, trainer, server, estimate, overrides)

    def _shapes(self, pipeline: Pipeline, kind: type[Section]) -> list[ModelShape]:
        """Of the models of all engines of that kind, which get one layout."""
        named = [name for name, engine in pipeline.engines.items() if isinstance(engine, kind)]
        return list(dict.fromkeys(engine_shape(pipeline, name, self.shape) for name in named))

    def _rooms(self, placed: Pipeline, placing: Placing, generating: Sequence[ServerChoice]) -> Iterator[float]:
        """Bytes that a trainer may take of a GPU: alone or by turns, and where it stays beside the smallest servers."""
        gpu = gpu_of_group(placed, placing.trainers, self.gpu)
        assert gpu is not None, "trainers are placed on GPUs"
        yield gpu.memory_bytes - (_OF_SLEEPERS if placing.together else 0)
        if placing.together and gpu.name == placing.groups[placing.trainers].gpu:
            peaks = []
            for choice in generating:
                pipeline = choice.applied(placed)
                plan = make_plan(pipeline, self.checked.graph)
                peaks.append(sum(self._peaks(pipeline, plan, gpu, SglangEngineSpec)))
            yield ROOM * gpu.memory_bytes - min(peaks, default=0)

    def _fastest_trainers(self, placed: Pipeline, placing: Placing, room: float) -> list[TrainerChoice]:
        """Layouts that fit into `room` bytes of each GPU, the best budget of each.

        What fits is asked as seldom as can be, best first: with something recomputed or offloaded a layout is slower.
        """
        # What a trainer takes of time and memory does not hang on where its ranks sit: one plan does for all layouts.
        plan = make_plan(placed, self.checked.graph)
        group = placing.groups[placing.trainers]
        longest = longest_row(placed)
        open_choices: list[tuple[float, int, bool, TrainerChoice]] = []
        numbers = count()

        def consider(choice: TrainerChoice, *, fits: bool) -> None:
            seconds = self._seconds(choice.applied(placed), plan, generates=False)
            heapq.heappush(open_choices, (seconds, next(numbers), fits, choice))

        for parallel in self._layouts(placed, group, longest):
            for budget in budgets(parallel, longest):
                consider(TrainerChoice(parallel, tokens_per_micro_batch=budget), fits=False)
        found: dict[ParallelSpec, TrainerChoice] = {}
        while open_choices and len(found) < _KEPT_TRAINERS:
            _, _, fits, choice = heapq.heappop(open_choices)
            if choice.parallel in found:
                continue
            if fits:
                found[choice.parallel] = choice
            elif fitting := self._first_that_fits(placed, placing, plan, choice, room):
                consider(fitting, fits=True)
        return list(found.values())

    def _layouts(self, placed: Pipeline, group: GroupSpec, longest: int) -> Iterator[ParallelSpec]:
        """Those that suit every model that is laid out so."""
        first, *others = self._shapes(placed, MegatronEngineSpec)
        rows = _rows_of_an_optimizer_step(placed)
        suitable = [set(layouts(shape, group, longest, rows)) for shape in others]
        for parallel in layouts(first, group, longest, rows):
            if all(parallel in those for those in suitable):
                yield parallel

    def _first_that_fits(
        self, placed: Pipeline, placing: Placing, plan: Plan, choice: TrainerChoice, room: float
    ) -> TrainerChoice | None:
        gpu = gpu_of_group(placed, placing.trainers, self.gpu)
        for offload, recompute in _WAYS_TO_FIT:
            smaller = replace(choice, recompute=recompute, offload_optimizer=offload)
            if max(self._peaks(smaller.applied(placed), plan, gpu, MegatronEngineSpec)) <= room:
                return smaller
        return None

    def _peaks(self, pipeline: Pipeline, plan: Plan, gpu: Gpu | None, kind: type[Section]) -> list[int]:
        """Bytes that each engine of that kind takes of a GPU at its fullest."""
        names = [name for name in plan.executors if isinstance(pipeline.engines.get(name), kind)]
        return [engine_memory(pipeline, plan, name, self.shape, gpu).peak for name in names]

    def _fastest_servers(self, placed: Pipeline, placing: Placing) -> list[ServerChoice]:
        """Of each size the one with the largest cache, and beside a trainer the smallest that is about as fast."""
        timed: dict[int, list[tuple[float, ServerChoice]]] = {}
        first, *others = self._shapes(placed, SglangEngineSpec) or [self.shape]
        group = placing.groups[placing.generators]
        suitable = [set(servers(shape, group)) for shape in others]
        for choice in servers(first, group):
            if not all(choice in those for those in suitable):
                continue
            pipeline = choice.applied(placed)
            seconds = self._seconds(pipeline, make_plan(pipeline, self.checked.graph), generates=True)
            timed.setdefault(choice.tp_size, []).append((seconds, choice))
        kept: list[ServerChoice] = []
        for found in heapq.nsmallest(_KEPT_SERVERS, timed.values(), key=lambda each: each[0][0]):
            enough = [choice for seconds, choice in found if seconds <= found[0][0] * _ABOUT_AS_FAST]
            kept += dict.fromkeys((enough[0], enough[-1]) if placing.together else enough[:1])
        return kept

    def _seconds(self, pipeline: Pipeline, plan: Plan, *, generates: bool) -> float:
        """Of a step's tasks on the engines that generate, or on the others, one after the other."""
        costs = self._costs(pipeline, plan)
        total = 0.0
        for task in plan.tasks:
            if task.rows is Rows.TRAIN and task.executor != HOST and task.generates == generates:
                whole = task.streams or task.scope is Scope.BATCH
                shards = tuple(range(plan.shards)) if whole else (0,)
                times = plan.rounds_of(task) * (1 if whole else plan.shards)
                total += costs.seconds(Run(1, task.name, shards)) * times
        return total

    def _costs(self, pipeline: Pipeline, plan: Plan) -> PipelineCosts:
        return PipelineCosts(pipeline, plan, self.shape, self.gpu, self.assumed)


def _rows_of_an_optimizer_step(pipeline: Pipeline) -> int:
    """Of the smallest one."""
    updates = [node for node in pipeline.nodes.values() if isinstance(node, TrainingNode)]
    prompts = min(node.mini_batch or pipeline.data.prompts_per_step for node in updates)
    return prompts * rows_per_prompt(pipeline)
