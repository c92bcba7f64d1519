"""Memory of a reward model inside its worker: weights, and what a forward pass needs beside them."""

from __future__ import annotations

from dagrl.backends.families.registry import engine_shape
from dagrl.backends.families.shape import ModelShape
from dagrl.config.schema import Pipeline, RewardModelNode
from dagrl.planner.memory.estimate import CONTEXT, EngineMemory, Kind

_HIDDEN_STATES = 6
"""Tensors as wide as the hidden state that a layer has at once: a guess."""


def classifier_memory(
    pipeline: Pipeline, engine: str, shape: ModelShape, *, on_gpu: bool, sleeps: bool = False
) -> EngineMemory:
    """Of an engine with ``backend: hf`` and ``head: reward``; `shape` is that of the pipeline's model.

    Of a model type that nobody here knows the weights' files say how many there are, and the rest is left out. It reads
    text in tokens of its own: how many go into a pass is taken from its node's budget.
    """
    value, stays = 2 if on_gpu else 4, CONTEXT if on_gpu else 0
    weights = classifier_parameters(pipeline, engine, shape) * value
    awake: dict[Kind, int] = {"weights": weights, "runtime": stays}
    notes: tuple[str, ...] = ()
    known = _known_shape(pipeline, engine, shape)
    if known is None:
        notes = ("of its passes nothing is known, for its model type is none that dagrl counts",)
    else:
        nodes = [node for node in pipeline.nodes.values() if isinstance(node, RewardModelNode)]
        tokens = max((node.tokens_per_micro_batch for node in nodes if node.engine == engine), default=0)
        width = _HIDDEN_STATES * known.hidden + 3 * max(known.dense_width, known.heads * known.head_dim)
        awake["activations"] = tokens * width * value
    return EngineMemory(
        awake=awake,
        moment="scores",
        weights_alone=weights + stays,
        asleep=stays,
        host=weights if sleeps else 0,
        notes=notes,
    )


def classifier_parameters(pipeline: Pipeline, engine: str, shape: ModelShape) -> int:
    """How many the model has, without an output layer for words; by its files where its shape is not known.

    ValueError where there is neither a known shape nor a folder.
    """
    known = _known_shape(pipeline, engine, shape)
    if known is not None:
        return known.parameters - known.output
    folder = pipeline.model_of(engine).path
    if folder is None:
        raise ValueError(f"engine `{engine}`: nothing is known of its model; give it a `path`")
    # Files hold 16 bits of each, as models are published.
    return sum(file.stat().st_size for file in folder.expanduser().glob("*.safetensors")) // 2


def _known_shape(pipeline: Pipeline, engine: str, shape: ModelShape) -> ModelShape | None:
    try:
        return engine_shape(pipeline, engine, shape)
    except ValueError:
        return None
