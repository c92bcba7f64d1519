"""What a search may choose: where engines live, how trainers and servers are laid out, and the same as overrides.

Each choice is overrides that a user pastes behind ``dagrl run`` and that the checks read. Layouts, of which there are
thousands, change a pipeline at once, too, which means the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypeIs

from dagrl.backends.megatron.layout_rules import UNEVEN_FIELDS
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.schema import EngineSpec, GroupSpec, PackingNode, Pipeline

_LAYOUT_FIELDS = (*UNEVEN_FIELDS, "microbatch_group_size_per_vp_stage")
"""Fields of ``transformer:`` that belong to the layout of the file."""
_RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
RECOMPUTE = tuple(_RECOMPUTE)
"""What may be recomputed, from the fastest to the smallest."""
_RECOMPUTE_FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_SERVER_LAYOUT = ("pp_size", "dp_size", "ep_size", "attn_cp_size", "moe_dp_size", "enable_dp_attention")
"""Fields of ``server:`` that belong to the layout of the file."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Where engines live."""

    groups: Mapping[str, GroupSpec] = field(hash=False)
    trainers: str
    """Group of the engines that train and compute log-probs."""
    generators: str

    @property
    def together(self) -> bool:
        """Whether they share their GPUs."""
        return self.trainers == self.generators

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        """The same, as overrides of the pipeline's file."""
        # Only a file that is loaded with them is so placed: sizes may grow with the machines of its groups.
        yield f"groups={{{', '.join(f'{name}: {_group(group)}' for name, group in self.groups.items())}}}"
        for name, engine in pipeline.engines.items():
            if engine.group is None:
                continue
            if engine.group != self._group_of(engine):
                yield f"engines.{name}.group={self._group_of(engine)}"
            if engine.sleep != "auto":
                yield f"engines.{name}.sleep=auto"
            if isinstance(engine, SglangEngineSpec) and engine.weight_sync.route != "auto":
                yield f"engines.{name}.weight_sync.route=auto"

    def _group_of(self, engine: EngineSpec) -> str:
        return self.trainers if isinstance(engine, MegatronEngineSpec) else self.generators


@dataclass(frozen=True, slots=True)
class TrainerChoice:
    """A layout of the engines that train, and what they do to fit."""

    parallel: ParallelSpec
    recompute: str = "none"
    offload_optimizer: bool = False
    tokens_per_micro_batch: int = 16384

    def applied(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with it."""
        engines: dict[str, EngineSpec] = {
            name: self._engine(engine) if _is_trainer(engine) else engine for name, engine in pipeline.engines.items()
        }
        budget = {"tokens_per_micro_batch": self.tokens_per_micro_batch}
        nodes = {
            name: node.model_copy(update=budget) if isinstance(node, PackingNode) else node
            for name, node in pipeline.nodes.items()
        }
        return pipeline.model_copy(update={"engines": engines, "nodes": nodes})

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        """The same, as overrides of the pipeline's file."""
        for name, engine in pipeline.engines.items():
            if not _is_trainer(engine):
                continue
            if engine.parallel != self.parallel:
                yield f"engines.{name}.parallel={_flow(self.parallel.model_dump(exclude_defaults=True))}"
            transformer = self._transformer(engine)
            for key in (*_RECOMPUTE_FIELDS, *_LAYOUT_FIELDS):
                if engine.transformer.get(key) != transformer.get(key):
                    yield f"engines.{name}.transformer.{key}={_flow(transformer.get(key))}"
            if engine.offload.optimizer != self.offload_optimizer:
                yield f"engines.{name}.offload.optimizer={_flow(self.offload_optimizer)}"
        for name, node in pipeline.nodes.items():
            if isinstance(node, PackingNode) and node.tokens_per_micro_batch != self.tokens_per_micro_batch:
                yield f"nodes.{name}.tokens_per_micro_batch={self.tokens_per_micro_batch}"

    def told(self) -> str:
        """For people: what is not as it is by default."""
        sizes = self.parallel
        names = (
            ("TP", sizes.tensor_model_parallel_size),
            ("PP", sizes.pipeline_model_parallel_size),
            ("VPP", sizes.virtual_pipeline_model_parallel_size or 1),
            ("CP", sizes.context_parallel_size),
            ("EP", sizes.expert_model_parallel_size),
        )
        words = [f"{name}{size}" for name, size in names if size > 1] or ["DP only"]
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offload_optimizer:
            words.append("offload optimizer")
        return " ".join([*words, f"{self.tokens_per_micro_batch // 1024}k"])

    def _engine(self, engine: MegatronEngineSpec) -> MegatronEngineSpec:
        offload = engine.offload.model_copy(update={"optimizer": self.offload_optimizer})
        changes = {"parallel": self.parallel, "transformer": self._transformer(engine), "offload": offload}
        return engine.model_copy(update=changes)

    def _transformer(self, engine: MegatronEngineSpec) -> dict[str, Any]:
        kept = {
            key: value
            for key, value in engine.transformer.items()
            if key not in _RECOMPUTE_FIELDS and key not in _LAYOUT_FIELDS
        }
        return kept | _RECOMPUTE[self.recompute]


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """A layout of the servers."""

    tp_size: int
    mem_fraction_static: float

    def applied(self, pipeline: Pipeline) -> Pipeline:
        """The pipeline with it."""
        engines: dict[str, EngineSpec] = {
            name: engine.model_copy(update={"server": self._server(engine)})
            if isinstance(engine, SglangEngineSpec)
            else engine
            for name, engine in pipeline.engines.items()
        }
        return pipeline.model_copy(update={"engines": engines})

    def overrides(self, pipeline: Pipeline) -> Iterator[str]:
        """The same, as overrides of the pipeline's file."""
        for name, engine in pipeline.engines.items():
            if isinstance(engine, SglangEngineSpec):
                wanted = self._server(engine)
                for key in dict.fromkeys((*engine.server, *wanted)):
                    if engine.server.get(key) != wanted.get(key):
                        yield f"engines.{name}.server.{key}={_flow(wanted.get(key))}"

    def told(self) -> str:
        """For people."""
        return f"TP{self.tp_size} {self.mem_fraction_static:g}"

    def _server(self, engine: SglangEngineSpec) -> dict[str, Any]:
        kept = {key: value for key, value in engine.server.items() if key not in _SERVER_LAYOUT}
        chosen = {"tp_size": self.tp_size, "mem_fraction_static": self.mem_fraction_static}
        # Experts that were spread over a server's GPUs stay so.
        if engine.server.get("ep_size", 1) > 1 and self.tp_size > 1:
            chosen["ep_size"] = self.tp_size
        return kept | chosen


def _is_trainer(engine: EngineSpec) -> TypeIs[MegatronEngineSpec]:
    return isinstance(engine, MegatronEngineSpec) and engine.frozen_copy_of is None


def _group(group: GroupSpec) -> str:
    return _flow(group.model_dump(exclude_defaults=True) | {"nodes": group.nodes})


def _flow(value: Any) -> str:
    """A value as YAML in one line, as overrides have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_flow, value))}]"
    return str(value)
