"""Memory and seconds of Hugging Face models inside a worker: generators and reward models."""

from __future__ import annotations

from functools import cached_property

from dagrl.backends.families.shape import ModelShape
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.planning.costs import EngineCosts
from dagrl.backends.planning.decoding import Server
from dagrl.backends.planning.memory import EngineMemory, Kind, memory_in_worker
from dagrl.backends.planning.planned_engine import PlannedEngine, Workload
from dagrl.config.schema import RewardModelNode

_HIDDEN_STATES = 6
"""Estimated number of tensors with the width of the hidden state that a layer holds at once."""


def generator_memory(shape: ModelShape, spec: HfEngineSpec, work: Workload, *, on_gpu: bool) -> EngineMemory:
    """Return the memory of a generator: weights, the cache of one batch, and its logits in float32."""
    value, batch = 2 if on_gpu else 4, spec.max_batch_size
    cache = shape.cache_values_per_token * shape.layers * value * batch * work.longest
    kinds: dict[Kind, int] = {"cache": cache, "logits": 2 * 4 * batch * shape.vocabulary}
    return memory_in_worker(shape.parameters * value, kinds, moment="rollout", on_gpu=on_gpu, sleeps=work.sleeps)


def classifier_memory(engine: PlannedEngine[HfEngineSpec]) -> EngineMemory:
    """Return the memory of a reward model: weights and a forward pass, whose tokens the budget of its node gives."""
    pipeline, on_gpu = engine.pipeline, engine.gpu is not None
    value = 2 if on_gpu else 4
    shape = _known_shape(engine)
    notes: tuple[str, ...] = ()
    kinds: dict[Kind, int] = {}
    if shape is None:
        notes = ("its passes are not counted, as dagrl does not know its model type",)
    else:
        nodes = [node for node in pipeline.nodes.values() if isinstance(node, RewardModelNode)]
        tokens = max((node.tokens_per_micro_batch for node in nodes if node.engine == engine.name), default=0)
        width = _HIDDEN_STATES * shape.hidden + 3 * max(shape.dense_width, shape.heads * shape.head_dim)
        kinds["activations"] = tokens * width * value
    weights = classifier_parameters(engine) * value
    sleeps = engine.executor.sleeps
    return memory_in_worker(weights, kinds, moment="scores", on_gpu=on_gpu, sleeps=sleeps, notes=notes)


def classifier_parameters(engine: PlannedEngine[HfEngineSpec]) -> int:
    """Count the parameters without the vocabulary's output layer, from the weight files if the shape is unknown."""
    shape = _known_shape(engine)
    if shape is not None:
        return shape.parameters - shape.output
    folder = engine.pipeline.model_of(engine.name).path
    if folder is None:
        raise ValueError(f"engine `{engine.name}`: its model type is unknown; give it a `path`")
    # Files hold 16 bits for each parameter, as in published models.
    return sum(file.stat().st_size for file in folder.expanduser().glob("*.safetensors")) // 2


def _known_shape(engine: PlannedEngine[HfEngineSpec]) -> ModelShape | None:
    try:
        return engine.shape
    except ValueError:
        return None


class HfCosts(EngineCosts):
    """Seconds of a generator or a reward model."""

    engine: PlannedEngine[HfEngineSpec]

    @cached_property
    def parameters(self) -> float:
        """Parameters of the whole model; a reward model has no output layer of the vocabulary."""
        return classifier_parameters(self.engine) if self.engine.spec.head == "reward" else super().parameters

    @cached_property
    def server(self) -> Server:
        size = self.engine.spec.max_batch_size
        return Server(self.engine.shape, self.device, running=size, shares_prompts=False, in_process=True)
