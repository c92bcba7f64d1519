"""Layouts of SGLang servers that a search tries, and ways to make servers fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.planning.changes import (
    Edit,
    Ladder,
    LayoutChoice,
    Room,
    doubled,
    flow,
    general_ladders,
    powers_of_two,
    replaced,
)
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import GroupSpec, Pipeline

_LAYOUT_FIELDS = ("pp_size", "dp_size", "ep_size", "attn_cp_size", "moe_dp_size", "enable_dp_attention")
"""Fields of ``server:`` that belong to the file's own layout."""
_MOST_RANKS = 8
"""Most tensor-parallel ranks of a server."""
_FRACTIONS = (0.85, 0.7, 0.5, 0.3)
"""Shares of a GPU for weights and cache; the smaller ones leave memory for a trainer that stays."""
_FRACTIONS_TO_FIT = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_WIDEST_SERVER = 32
"""GPUs of a server that is made to fit; more than one machine's only if nothing less fits."""


def ladders(engine: PlannedEngine[SglangEngineSpec], room: Room) -> Iterator[Ladder]:
    """Yield ways to make servers fit: another share of each GPU, more GPUs, or both."""
    fields = engine.spec.server
    given = fields.get("mem_fraction_static")
    near = sorted(_FRACTIONS_TO_FIT, key=lambda fraction: abs(fraction - float(given or 0.9)))

    def changes(key: str, values: Iterator[object]) -> list[Edit]:
        return [Edit({("engines", engine.name, "server", key): value}) for value in values]

    fractions = changes("mem_fraction_static", (value for value in near if value != given))
    sizes = changes("tp_size", doubled(int(fields.get("tp_size", 1)), min(room.ranks, _WIDEST_SERVER)))
    yield from general_ladders(engine)
    yield Ladder(fractions)
    yield Ladder(sizes)
    # If the weights fill a GPU, neither helps alone.
    yield Ladder([size | fraction for size, fraction in product(sizes, fractions)], last_resort=True)


@dataclass(frozen=True, slots=True)
class SglangLayout(LayoutChoice):
    """A layout of the servers."""

    tp_size: int
    mem_fraction_static: float

    @property
    def layout(self) -> int:
        return self.tp_size

    def applied(self, pipeline: Pipeline) -> Pipeline:
        servers = {
            name: engine.model_copy(update={"server": self._server(engine)})
            for name, engine in pipeline.engines.items()
            if isinstance(engine, SglangEngineSpec)
        }
        return replaced(pipeline, servers)

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        for name, engine in pipeline.engines.items():
            if isinstance(engine, SglangEngineSpec):
                wanted = self._server(engine)
                for key in dict.fromkeys((*engine.server, *wanted)):
                    if engine.server.get(key) != wanted.get(key):
                        yield f"engines.{name}.server.{key}={flow(wanted.get(key))}"

    def label(self) -> str:
        return f"TP{self.tp_size} {self.mem_fraction_static:g}"

    def _server(self, engine: SglangEngineSpec) -> dict[str, object]:
        kept = {key: value for key, value in engine.server.items() if key not in _LAYOUT_FIELDS}
        chosen = {"tp_size": self.tp_size, "mem_fraction_static": self.mem_fraction_static}
        # Experts that were spread over the GPUs of a server stay so.
        if engine.server.get("ep_size", 1) > 1 and self.tp_size > 1:
            chosen["ep_size"] = self.tp_size
        return kept | chosen


ANY_LAYOUT = SglangLayout(1, 0.8)
"""It fits every group."""


def layouts(shapes: Sequence[ModelShape], group: GroupSpec) -> Iterator[SglangLayout]:
    """Yield the layouts of servers within the machines of a group that suit all of these models."""
    for tensor, fraction in product(powers_of_two(min(group.gpus_per_node, _MOST_RANKS)), _FRACTIONS):
        if group.gpus_per_node % tensor == 0 and all(_divides_heads(shape, tensor) for shape in shapes):
            yield SglangLayout(tensor, fraction)


def _divides_heads(shape: ModelShape, tensor: int) -> bool:
    keys = shape.key_value_heads
    return shape.heads % tensor == 0 and (bool(shape.latent) or keys % tensor == 0 or tensor % keys == 0)
