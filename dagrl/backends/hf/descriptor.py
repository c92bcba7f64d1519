"""Descriptor of ``backend: hf``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dagrl.backends.backend import Backend, EngineStart, WeightReader
from dagrl.backends.hf.memory import HfCosts, classifier_memory, generator_memory
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine

if TYPE_CHECKING:
    from dagrl.backends.base import GenerateEngine, ScoreEngine


class HfBackend(Backend[HfEngineSpec]):
    """Hugging Face models inside the worker."""

    name = "hf"
    summary = "Hugging Face models inside the worker: generates, judges, scores with a reward model"
    requires = ("transformers",)

    def build(self, start: EngineStart) -> GenerateEngine | ScoreEngine:
        """A generator, or a classifier with ``head: reward``."""
        spec = start.section(HfEngineSpec)
        from dagrl.backends.hf.classifier import HfClassifier
        from dagrl.backends.hf.engine import HfEngine

        kind = HfClassifier if spec.head == "reward" else HfEngine
        return kind(start.model, spec, start.ranks)

    def preload(self, engine: HfEngineSpec) -> None:
        import_module("dagrl.backends.hf.classifier" if engine.head == "reward" else "dagrl.backends.hf.engine")

    def weight_reader(self, engine: HfEngineSpec) -> WeightReader | None:
        """Transformers read quantised classifiers; generators with ``weights_from`` start empty."""
        if engine.weights_from is not None:
            return None
        reward = engine.head == "reward"
        return WeightReader(engine.head, strict=not reward, quantised=reward)

    def memory(self, engine: PlannedEngine[HfEngineSpec]) -> EngineMemory:
        if engine.spec.head == "reward":
            return classifier_memory(engine)
        return generator_memory(engine.shape, engine.spec, engine.work, on_gpu=engine.gpu is not None)

    def costs(self, engine: PlannedEngine[HfEngineSpec]) -> HfCosts:
        return HfCosts(engine)


BACKEND = HfBackend()
