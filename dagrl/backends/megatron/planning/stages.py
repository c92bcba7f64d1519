"""Pipeline stages: their layers, their micro-batches in flight, and the parameters of each of their ranks.

Arithmetic on the ``parallel:`` and ``transformer:`` sections of an engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dagrl.backends.families.config_fields import MegatronFields
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.lora import adapters
from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec, padded_vocab_size
from dagrl.model_files.number_formats import NUMBER_FORMATS

_LAYOUT_WORDS = {"e": "embedding", "t": "decoder", "l": "loss", "m": "mtp"}


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage's part of the model."""

    index: int
    stages: int
    chunks: tuple[tuple[int, ...], ...]
    """Layers of each chunk, by their numbers in the whole model; one chunk without virtual stages."""
    round_size: int
    """Consecutive micro-batches of a chunk in the interleaved schedule."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def in_flight(self, micro_batches: int) -> float:
        """Return the most micro-batches whose activations the stage holds, as a multiple of all its chunks.

        One-forward-one-backward: one for the stage and each stage after it. Interleaved: as in Megatron's
        ``get_pp_rank_microbatches`` (arXiv 2104.04473, section 2.2).
        """
        if len(self.chunks) == 1:
            return min(self.stages - self.index, micro_batches)
        ahead = 2 * (self.stages - self.index - 1) + (len(self.chunks) - 1) * self.round_size + 1
        return min(ahead, micro_batches * len(self.chunks)) / len(self.chunks)


def stages_of(engine: MegatronEngineSpec, layers: int) -> list[Stage]:
    """Return the stages of a model. ValueError if its layers do not divide so."""
    sizes, fields = engine.parallel, engine.transformer
    stages, chunks = sizes.pp, sizes.chunks
    counts = _counts(fields, stages, chunks, layers)
    if sum(map(sum, counts)) != layers:
        raise ValueError(
            f"{layers} layers do not lie evenly on {stages} pipeline stages"
            + (f" of {chunks} chunks" if chunks > 1 else "")
            + "; choose a divisor, or `transformer: {num_layers_in_first_pipeline_stage: ...}`"
        )
    # The first chunks of all stages come first.
    held: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
    next_layer = 0
    for chunk in range(len(counts[0])):
        for stage in range(stages):
            held[stage].append(tuple(range(next_layer, next_layer + counts[stage][chunk])))
            next_layer += counts[stage][chunk]
    round_size = int(fields.get("microbatch_group_size_per_vp_stage") or stages)
    return [Stage(index, stages, tuple(chunks), round_size) for index, chunks in enumerate(held)]


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of one rank. The ranks that hold the same of a kind share its optimizer states."""

    dense: int
    """All parameters except routed experts: data- and context-parallel ranks hold the same."""
    experts: int
    """Routed experts: expert-data-parallel ranks hold the same."""
    largest: int
    """The largest single parameter that an update changes."""
    adapters: tuple[int, int] | None = None
    """With ``lora`` or ``freeze``, the number of dense and of experts' parameters that an update changes. Default:
    all."""

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> tuple[int, int]:
        """Parameters that an update changes: dense ones, and ones of experts."""
        return self.adapters or (self.dense, self.experts)


def rank_parameters(shape: ModelShape, engine: MegatronEngineSpec, stage: Stage) -> RankParameters:
    """Count the parameters of a rank of a stage; all its ranks hold equally many."""
    tensor, dense, experts, largest = engine.parallel.tp, 0, 0, 0
    for index in stage.layers:
        layer = shape.layer(index)
        dense += (layer.attention + layer.mlp) // tensor + layer.whole
        experts += layer.experts // engine.parallel.expert_ranks
        largest = max(largest, layer.attention // 2 // tensor, 2 * layer.mlp // 3 // tensor)
    vocabulary = padded_vocab_size(shape.vocabulary, tensor) // tensor * shape.hidden
    # With a value or reward head the output layer is a vector, and nothing is tied to it.
    tied = shape.tied and engine.head == "lm"
    tower = shape.vision.parameters if shape.vision and stage.is_first else 0
    dense += tower
    if stage.is_first:
        dense += vocabulary
        largest = max(largest, vocabulary)
    if stage.is_last:
        dense += shape.final_norm
        if engine.head != "lm":
            dense += shape.hidden
        elif not (tied and stage.is_first):
            # If first and last stage differ, a tied output layer is a copy of the embedding.
            dense += vocabulary
            largest = max(largest, vocabulary)
    if engine.lora is None:
        unfrozen = (dense - tower, experts) if "vision" in engine.freeze else None
        return RankParameters(dense, experts, largest, unfrozen)
    added, added_experts = _adapter_parameters(shape, engine, stage)
    # A value or reward head is trained with them.
    trained = added + (shape.hidden if stage.is_last and engine.head != "lm" else 0)
    return RankParameters(dense + added, experts + added_experts, 0, (trained, added_experts))


def _adapter_parameters(shape: ModelShape, engine: MegatronEngineSpec, stage: Stage) -> tuple[int, int]:
    assert engine.lora is not None
    sizes, dense, experts = engine.parallel, 0, 0
    # Layers of a kind have equal parameters.
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index in stage.layers:
        kinds.setdefault((shape.is_mixture(index), shape.is_linear(index)), []).append(index)
    for layers in kinds.values():
        for adapter in adapters(shape.layer_tensors(layers[0]), engine.lora):
            if adapter.base.per_expert and shape.experts is not None:
                experts += len(layers) * shape.experts.count * adapter.numel // sizes.expert_ranks
            else:
                ranks = sizes.tp if adapter.base.map.split else 1
                dense += len(layers) * adapter.numel // ranks
    return dense, experts


def replicas_of_parameters(parallel: ParallelSpec, ranks: int) -> tuple[int, int]:
    """Return the number of ranks with the same dense parameters, and with the same experts."""
    stage = ranks // parallel.pp
    return stage // parallel.tp, stage // parallel.expert_ranks


def _counts(fields: MegatronFields, stages: int, chunks: int, layers: int) -> list[list[int]]:
    if layout := fields.get("pipeline_model_parallel_layout"):
        return _of_layout(layout, stages)
    first, last = (fields.get(f"num_layers_in_{which}_pipeline_stage") for which in ("first", "last"))
    if first is not None or last is not None:
        middle = stages - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        count = rest // middle if middle else 0
        of_stages = [count] * stages
        if first is not None:
            of_stages[0] = first
        if last is not None:
            of_stages[-1] = last
        return [[count // chunks] * chunks for count in of_stages]
    embedding, loss = (bool(fields.get(f"account_for_{what}_in_pipeline_split")) for what in ("embedding", "loss"))
    count = (layers + embedding + loss) // (stages * chunks)
    counts = [[count] * chunks for _ in range(stages)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return counts


def _of_layout(layout: str | Sequence[Sequence[str]], stages: int) -> list[list[int]]:
    """Read Megatron's notation: ``Et*3|t*4|...|L`` or lists of words, chunk by chunk, within one stage by stage."""
    parts = _words(layout) if isinstance(layout, str) else layout
    counts = [sum(str(word).strip().lower() == "decoder" for word in part) for part in parts]
    if len(counts) % stages:
        raise ValueError(
            f"transformer.pipeline_model_parallel_layout has {len(counts)} parts, which {stages} pipeline stages do "
            "not divide; give each stage as many"
        )
    return [counts[stage::stages] for stage in range(stages)]


def _words(layout: str) -> list[list[str]]:
    text = layout.replace(",", "").replace(" ", "")
    # Expand brackets before single letters: `(tt|)*2` and `t*3`.
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return [[_LAYOUT_WORDS.get(letter.lower(), letter) for letter in part] for part in text.split("|")]


STATE_BYTES = 12
"""Float32 weight and two moments, by default."""


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """States that one rank keeps between steps."""

    parameters: float
    each: int
    """Bytes of one parameter's states."""
    host_share: float
    """Share of the parameters whose states and step are on the host."""

    @property
    def on_device(self) -> float:
        return self.parameters * self.each * (1 - self.host_share)

    @property
    def on_host(self) -> float:
        return self.parameters * self.each * self.host_share


def optimizer_states(held: RankParameters, spec: MegatronEngineSpec, ranks: int, value: int) -> OptimizerStates:
    """Count the states of a rank with parameters of `value` bytes."""
    fields = spec.optimizer
    parameters = float(sum(held.trained))
    if fields.get("use_distributed_optimizer", True):
        dense, experts = replicas_of_parameters(spec.parallel, ranks)
        parameters = held.trained[0] / dense + held.trained[1] / experts
    if fields.get("optimizer_cpu_offload"):
        # A step on the host needs all states in float32.
        return OptimizerStates(parameters, STATE_BYTES, float(fields.get("optimizer_offload_fraction", 1.0)))
    return OptimizerStates(parameters, _state_bytes(fields, value), 0.0)


def _state_bytes(fields: MegatronFields, value: int) -> int:
    """Return the bytes for one parameter: its float32 weight, if the model has fewer bits, and the moments."""
    precise = bool(fields.get("use_precision_aware_optimizer"))

    def number(name: str) -> int:
        return NUMBER_FORMATS[fields.get(name, "fp32")].nbytes if precise else 4

    moments = number("exp_avg_dtype") + number("exp_avg_sq_dtype")
    if fields.get("optimizer", "adam") == "sgd":
        moments = 4 if fields.get("sgd_momentum", 0.9) else 0
    if value == 4:
        return moments
    main = number("main_params_dtype")
    # The remainder of a bfloat16 weight is two bytes.
    if precise and main == 4 and fields.get("store_param_remainders", True):
        main = 2
    return main + moments
