"""Seconds of Hugging Face models inside a worker."""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.hf.memory import classifier_parameters
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.planning.costs import EngineCosts
from dagrl.backends.planning.decoding import Server
from dagrl.backends.planning.planned_engine import PlannedEngine


class HfCosts(EngineCosts):
    """Seconds of a generator or a reward model."""

    engine: PlannedEngine[HfEngineSpec]

    @cached_property
    def parameters(self) -> float:
        """Parameters of the whole model; a reward model has no output layer for words."""
        return classifier_parameters(self.engine) if self.engine.spec.head == "reward" else super().parameters

    @cached_property
    def server(self) -> Server:
        size = self.engine.spec.max_batch_size
        return Server(self.engine.shape, self.device, running=size, shares_prompts=False, in_process=True)
