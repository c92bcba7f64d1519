"""The descriptor of a backend: its interface to the rest of dagrl. Imports neither torch nor Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.families.sizes import ModelSizes
from dagrl.backends.planning.changes import Edit, Ladder, LayoutChoice, Room, general_ladders
from dagrl.backends.planning.costs import EngineCosts
from dagrl.backends.planning.memory import EngineMemory, memory_in_worker
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.tested import LibraryVersions
from dagrl.backends.tool_calls import Parser
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import EngineSpec, GroupSpec, ModelSpec, Pipeline
from dagrl.config.schema.engine import Head

if TYPE_CHECKING:
    from dagrl.backends.base import AnyEngine


@dataclass(frozen=True, slots=True)
class RankContext:
    """Place of a worker among the ranks of its engine, and their rendezvous."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    timeout_s: float
    """Bound of every collective, in seconds."""
    seed: int
    listen_fd: int | None = None
    """On rank 0: a socket that already listens on `master_port`, so that no other process can take the port."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Input of `Backend.build`: one rank of an engine in a worker."""

    pipeline: Pipeline
    name: str
    ranks: RankContext
    trained: bool = False
    keeps_start_weights: bool = False
    """Whether another engine is a ``frozen_copy_of`` it."""
    gpus: tuple[str, ...] = ()
    """For servers: GPUs of the server on this machine, if this rank starts its processes."""
    run_dir: Path = Path()

    def section[Spec: EngineSpec](self, kind: type[Spec]) -> Spec:
        """The engine's section, which is a `kind`."""
        section = self.pipeline.engines[self.name]
        assert isinstance(section, kind), f"{self.name} is no {kind.__name__}"
        return section

    @property
    def model(self) -> ModelSpec:
        return self.pipeline.model_of(self.name)


@dataclass(frozen=True, slots=True)
class WeightReader:
    """How an engine reads the weights of a model's folder."""

    head: Head = "lm"
    """A value head may be missing in the folder."""
    strict: bool = True
    """Whether it rejects tensors that are not part of the model."""
    quantised: bool = False
    """Whether it reads quantised weights."""
    checked: bool = True
    """Whether the folder can be checked; False if options change how it is read."""


@dataclass(frozen=True, slots=True)
class EngineCheck[Spec: EngineSpec]:
    """Input of `Backend.validate`: one engine of a pipeline."""

    pipeline: Pipeline
    name: str
    engine: Spec
    sizes: ModelSizes
    """The known sizes of its model."""
    findings: Findings

    @property
    def place(self) -> Place:
        return ("engines", self.name)


class Backend[Spec: EngineSpec](ABC):
    """One backend. A subclass for its section in `dagrl/backends/NAME/descriptor.py`, with one instance ``BACKEND``."""

    name: str
    summary: str
    """One line for ``dagrl doctor``."""
    requires: tuple[str, ...] = ()
    """Packages that it imports, by their import names."""
    tested: LibraryVersions | None = None
    """Tested versions of the first of `requires`; None for all that dagrl's requirements allow."""
    gpu_requires: tuple[str, ...] = ()
    """Further packages on a machine with GPUs."""
    builds_families: bool = False
    """Whether it builds models from `dagrl.backends.families`, and supports no others."""
    any_layout: LayoutChoice | None = None
    """A layout for any group; None if a search cannot lay the engines out."""

    @abstractmethod
    def build(self, start: EngineStart) -> AnyEngine:
        """Build one rank, whose interface is one of `dagrl.backends.base`. Runs in a worker."""

    def preload(self, engine: Spec) -> None:  # noqa: B027 (a backend need not import much)
        """Import the packages of `build`. Runs in a worker while other engines start on the same devices."""

    def validate(self, check: EngineCheck[Spec]) -> None:  # noqa: B027 (a backend need not have rules)
        """Report unsupported options to `check.findings`. Runs in ``dagrl validate``, without torch."""

    def weight_reader(self, engine: Spec) -> WeightReader | None:
        """The way in which its ranks read the weights of the model's folder; None if they do not."""
        return WeightReader(engine.head) if engine.weights_from is None else None

    def architectures(self, environment: Path | None) -> set[str]:
        """The Hugging Face model classes that its library implements, read from its files in an environment."""
        return set()

    def tool_formats(self) -> tuple[str, ...]:
        """Values of ``tool_format`` that `tool_parser` reads."""
        return ()

    def tool_parser(self, name: str, schemas: Sequence[Mapping[str, Any]]) -> Parser:
        """A parser of tool calls in that format, for tools with these JSON schemas. Runs in a worker."""
        raise ValueError(f"backend {self.name} does not parse tool calls in the format {name}; choose hermes")

    def owns_folder(self, folder: Path) -> bool:
        """Whether `folder` holds weights in the backend's own format, for ``dagrl convert --to hf``."""
        return False

    def write_hf(self, source: Path, model: ModelSpec, output: Path, engine: Spec | None = None, seed: int = 0) -> None:
        """Write weights in the backend's own format as a Hugging Face folder, with `model`'s config and tokenizer.

        `engine` is the section of the engine that saved them, and `seed` the seed of its run.
        """
        raise ValueError(f"weights of backend {self.name} cannot be converted; choose another engine")

    def write_adapter(self, source: Path, model: ModelSpec, output: Path, engine: Spec) -> None:
        """Write the low-rank adapters that `engine` saved as a PEFT folder."""
        raise ValueError(f"backend {self.name} has no low-rank adapters; export whole weights, without --adapter")

    def write_own(self, source: Path, output: Path) -> None:
        """Write a Hugging Face folder in the backend's own format."""
        raise ValueError(f"backend {self.name} has no format to convert to; choose another backend")

    def start_folder(self, engine: Spec) -> str | None:
        """A folder of start weights that the engine reads in place of the model's."""
        return None

    # -- planning: without torch, and without a device

    def memory(self, engine: PlannedEngine[Spec]) -> EngineMemory:
        """Estimate the memory of its fullest device. Default: the weights of a whole model in 16 bits."""
        weights, sleeps = 2 * engine.shape.parameters, engine.executor.sleeps
        return memory_in_worker(weights, {}, moment="work", on_gpu=engine.gpu is not None, sleeps=sleeps)

    def costs(self, engine: PlannedEngine[Spec]) -> EngineCosts:
        """Estimate the seconds of its work and moves. Default: for ranks that hold whole models."""
        return EngineCosts(engine)

    def changes(self, engine: PlannedEngine[Spec], room: Room) -> Iterable[Ladder]:
        """Yield ways to reduce its memory, the fastest first."""
        return general_ladders(engine)

    def savings(self, engine: PlannedEngine[Spec]) -> Iterable[Edit]:
        """Yield changes that may save time without changing results."""
        return ()

    def suits_machines(self, engine: Spec, group: GroupSpec) -> bool:
        """Whether ranks that must share a machine do so on a group of several machines."""
        return True

    def layouts(self, pipeline: Pipeline, shapes: Sequence[ModelShape], group: GroupSpec) -> Iterable[LayoutChoice]:
        """Yield the layouts on a group that a search tries for engines with models of these shapes."""
        return ()
