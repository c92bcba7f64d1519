"""The search: the fastest fitting trainers and generators of each placement, ranked by the simulated step.

Trainers and generators are first estimated separately, in thousands of layouts: the seconds of their tasks, and whether
they fit beside a sleeper. The best ones are combined, must fit as a whole, and are simulated; the best combinations are
validated.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, product

from dagrl.backends.backend import Backend
from dagrl.backends.families.registry import engine_shape, model_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.fit import ROOM, engine_memory, fit, with_sleep_decided
from dagrl.backends.planning.changes import LayoutChoice
from dagrl.backends.planning.gpus import DEFAULT_GPU, Gpu, gpu_named, gpu_of_group
from dagrl.backends.registry import backend_of, backends
from dagrl.config.capability import Capability
from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import LoadedPipeline, load_pipeline
from dagrl.config.schema import EngineSpec, Pipeline, Scope, TrainingNode
from dagrl.config.schema.backends import engine_sections
from dagrl.planner.cost.bound import StepBound, step_bound
from dagrl.planner.cost.calibration import Calibration
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import StepEstimate, estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.search.space import Cluster, Placing, placings
from dagrl.plugins.isolation import isolated_imports
from dagrl.scheduler.commands import Run
from dagrl.scheduler.placement import make_plan
from dagrl.scheduler.plan import HOST, Plan, Rows
from dagrl.validation import CheckedPipeline, check_file

_ASSUMED, _UNCALIBRATED = Assumed(), Calibration()
_KEPT_TRAINERS = 5
_KEPT_SERVERS = 2
"""Layouts of trainers and of generators that are simulated for each placing."""
_ABOUT_AS_FAST = 1.05
_OF_SLEEPERS = 4 << 30
"""Bytes that sleepers beside a trainer keep, with a margin; the sum is estimated later."""
_OF_ONE_PLACING = 2
"""Proposals of one placement that are shown before others, so that users have a choice."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Choices that fit together."""

    placing: Placing
    trainer: LayoutChoice
    server: LayoutChoice | None
    """None if nothing is sampled."""
    estimate: StepEstimate
    bound: StepBound
    overrides: tuple[str, ...]
    """Overrides of the user's pipeline."""


@isolated_imports()
def search(
    checked: CheckedPipeline,
    cluster: Cluster,
    *,
    gpu: str = DEFAULT_GPU,
    assumed: Assumed = _ASSUMED,
    calibration: Calibration = _UNCALIBRATED,
    top: int = 5,
) -> list[Proposal]:
    """Return the `top` proposals for a pipeline on a cluster, fastest step first; none if nothing fits.

    `gpu` applies to a cluster that names none; `calibration` corrects the cost model on that cluster. ValueError for a
    pipeline that a search cannot lay out.
    """
    pipeline = checked.loaded.pipeline
    _refuse(pipeline)
    seeker = _Seeker(checked, model_shape(pipeline.model), gpu, assumed, calibration)
    chosen: list[Proposal] = []
    others: list[Proposal] = []
    for proposal in sorted(seeker.proposals(cluster), key=_seconds_per_token):
        if len(chosen) == top:
            break
        alike = [other for other in chosen if other.placing == proposal.placing]
        rivals = [*alike, *(other for other in others if other.placing == proposal.placing)]
        if any(_kind(rival) == _kind(proposal) for rival in rivals):
            continue
        if len(alike) == _OF_ONE_PLACING:
            others.append(proposal)
        elif _passes(checked.loaded, proposal):
            chosen.append(proposal)
    spare = (proposal for proposal in others if _passes(checked.loaded, proposal))
    return sorted([*chosen, *islice(spare, top - len(chosen))], key=_seconds_per_token)


def _kind(proposal: Proposal) -> tuple[LayoutChoice, Hashable]:
    """Return the properties that users choose by; excludes, for example, a server's share of memory."""
    return proposal.trainer, proposal.server.layout if proposal.server else None


def _seconds_per_token(proposal: Proposal) -> float:
    """Return the key of the order: the step's seconds, relative to its size if this grows with the machines."""
    return proposal.estimate.step_s / proposal.estimate.response_tokens


def _refuse(pipeline: Pipeline) -> None:
    used: dict[bool, str] = {}
    for name, engine in pipeline.engines.items():
        if backend_of(engine).any_layout is None:
            wanted = engine.capabilities & {Capability.GENERATE}
            known = " or ".join(
                known
                for known, section in engine_sections().items()
                if backends()[known].any_layout and section.capabilities >= wanted
            )
            raise ValueError(
                f"engine `{name}` has the backend {engine.backend}, which has no layout to search for; choose {known}"
            )
        if used.setdefault(engine.generates, engine.backend) != engine.backend:
            raise ValueError(f"engine `{name}`: a search lays out one backend that generates and one that does not")
    if not any(isinstance(node, TrainingNode) for node in pipeline.nodes.values()):
        raise ValueError("nothing is trained, and layouts are ranked by steps of training; add a node that trains")


def _passes(loaded: LoadedPipeline, proposal: Proposal) -> bool:
    try:
        check_file(loaded.path, [*loaded.overrides, *proposal.overrides], with_files=False)
    except PipelineError:
        return False
    return True


@dataclass(frozen=True)
class _Seeker:
    """A pipeline, and the inputs of its estimates."""

    checked: CheckedPipeline
    shape: ModelShape
    gpu: str
    assumed: Assumed
    calibration: Calibration

    def proposals(self, cluster: Cluster) -> Iterator[Proposal]:
        """Yield the best combinations for every placement."""
        loaded = self.checked.loaded
        given = loaded.pipeline
        # Engines are placed separately only if training uses their samples.
        for placing in placings(cluster, together=given.is_offline):
            # The file's layouts are for its own groups.
            placed = load_pipeline(loaded.path, [*loaded.overrides, *placing.overrides(given)]).pipeline
            for backend in self._backends.values():
                assert backend.any_layout is not None, f"{backend.name} is refused"
                placed = backend.any_layout.applied(placed)
            generating = self._fastest_servers(placed, placing)
            choices: list[LayoutChoice | None] = [*generating] if True in self._backends else [None]
            training = [
                choice
                for room in self._rooms(placed, placing, generating)
                for choice in self._fastest_trainers(placed, placing, room)
            ]
            for trainer, server in product(dict.fromkeys(training), choices):
                laid_out = trainer.applied(placed)
                laid_out = server.applied(laid_out) if server else laid_out
                plan = make_plan(laid_out, self.checked.graph)
                fitted = with_sleep_decided(fit(laid_out, plan, gpu=self.gpu, shape=self.shape))
                if not fitted.problems:
                    of_server = server.overrides(given) if server else ()
                    overrides = (*placing.overrides(given), *trainer.overrides(given), *of_server)
                    costs = self._costs(fitted.pipeline, fitted.plan)
                    bound = step_bound(costs, [gpu_named(cluster.gpu or self.gpu)] * cluster.gpus)
                    yield Proposal(placing, trainer, server, estimate_step(costs), bound, overrides)

    @cached_property
    def _backends(self) -> dict[bool, Backend[EngineSpec]]:
        """Whether engines generate -> their backend; all its engines get one layout."""
        return {engine.generates: backend_of(engine) for engine in self.checked.loaded.pipeline.engines.values()}

    def _layouts(self, placed: Pipeline, placing: Placing, *, generates: bool) -> Iterable[LayoutChoice]:
        named = [name for name, engine in placed.engines.items() if engine.generates == generates]
        shapes = list(dict.fromkeys(engine_shape(placed, name, self.shape) for name in named))
        group = placing.groups[placing.generators if generates else placing.trainers]
        return self._backends[generates].layouts(placed, shapes, group) if named else ()

    def _rooms(self, placed: Pipeline, placing: Placing, generating: Sequence[LayoutChoice]) -> Iterator[float]:
        """Yield the bytes of a GPU for a trainer: alone or in turns, and beside the smallest servers."""
        gpu = gpu_of_group(placed, placing.trainers, self.gpu)
        assert gpu is not None, "trainers are placed on GPUs"
        yield gpu.memory_bytes - (_OF_SLEEPERS if placing.together else 0)
        if placing.together and gpu.name == placing.groups[placing.trainers].gpu:
            peaks = []
            for choice in generating:
                pipeline = choice.applied(placed)
                plan = make_plan(pipeline, self.checked.graph)
                peaks.append(sum(self._peaks(pipeline, plan, gpu, generates=True)))
            yield ROOM * gpu.memory_bytes - min(peaks, default=0)

    def _fastest_trainers(self, placed: Pipeline, placing: Placing, room: float) -> list[LayoutChoice]:
        """Return the best choices, one for each layout, that fit into `room` bytes of each GPU.

        Memory is estimated for the best first, because ways to fit only make a layout slower.
        """
        # A trainer's seconds and memory do not depend on its ranks' places, so one plan is enough for all layouts.
        plan = make_plan(placed, self.checked.graph)
        gpu = gpu_of_group(placed, placing.trainers, self.gpu)
        open_choices: list[tuple[float, int, bool, LayoutChoice]] = []
        numbers = count()

        def fits_room(choice: LayoutChoice) -> bool:
            return max(self._peaks(choice.applied(placed), plan, gpu, generates=False)) <= room

        def consider(choice: LayoutChoice, *, fits: bool) -> None:
            seconds = self._seconds(choice.applied(placed), plan, generates=False)
            heapq.heappush(open_choices, (seconds, next(numbers), fits, choice))

        for choice in self._layouts(placed, placing, generates=False):
            consider(choice, fits=False)
        best: dict[Hashable, LayoutChoice] = {}
        while open_choices and len(best) < _KEPT_TRAINERS:
            _, _, fits, choice = heapq.heappop(open_choices)
            if choice.layout in best:
                continue
            if fits:
                best[choice.layout] = choice
            elif smaller := next(filter(fits_room, choice.smaller()), None):
                consider(smaller, fits=True)
        return list(best.values())

    def _peaks(self, pipeline: Pipeline, plan: Plan, gpu: Gpu | None, *, generates: bool) -> list[int]:
        """Return the bytes of a GPU that each engine takes at its peak."""
        names = [name for name in plan.executors if name != HOST and pipeline.engines[name].generates == generates]
        return [engine_memory(pipeline, plan, name, self.shape, gpu).peak for name in names]

    def _fastest_servers(self, placed: Pipeline, placing: Placing) -> list[LayoutChoice]:
        """Return the first choice of each fast layout, and for a trainer also the last one that is about as fast."""
        timed: dict[Hashable, list[tuple[float, LayoutChoice]]] = {}
        for choice in self._layouts(placed, placing, generates=True):
            pipeline = choice.applied(placed)
            seconds = self._seconds(pipeline, make_plan(pipeline, self.checked.graph), generates=True)
            timed.setdefault(choice.layout, []).append((seconds, choice))
        kept: list[LayoutChoice] = []
        for timings in heapq.nsmallest(_KEPT_SERVERS, timed.values(), key=lambda timings: timings[0][0]):
            enough = [choice for seconds, choice in timings if seconds <= timings[0][0] * _ABOUT_AS_FAST]
            kept += dict.fromkeys((enough[0], enough[-1]) if placing.together else enough[:1])
        return kept

    def _seconds(self, pipeline: Pipeline, plan: Plan, *, generates: bool) -> float:
        """Return the seconds of a step's tasks on engines that generate, or on the others, one after the other."""
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
        return PipelineCosts(pipeline, plan, self.shape, self.gpu, self.assumed, self.calibration)
