"""Descriptor of ``backend: megatron``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.backends.backend import Backend, EngineCheck, EngineStart, WeightReader
from dagrl.backends.extra_fields import check_extra
from dagrl.backends.families.registry import find_family, unknown_family
from dagrl.backends.families.shape import ModelShape
from dagrl.backends.megatron.field_rules import check_field_rules, check_fp8
from dagrl.backends.megatron.layout_rules import check_layout
from dagrl.backends.megatron.lora_rules import check_lora
from dagrl.backends.megatron.options import check_learning_rate, check_options, shared_prompts
from dagrl.backends.megatron.planning.costs import MegatronCosts
from dagrl.backends.megatron.planning.layouts import ANY_LAYOUT, MegatronLayout, ladders, layouts
from dagrl.backends.megatron.planning.memory import trainer_memory
from dagrl.backends.megatron.section import MegatronEngineSpec, padded_vocab_size
from dagrl.backends.megatron.stored_folder import CONFIG, LATEST
from dagrl.backends.planning.changes import Edit, Ladder, Room
from dagrl.backends.planning.memory import EngineMemory
from dagrl.backends.planning.planned_engine import PlannedEngine
from dagrl.config.schema import GroupSpec, ModelSpec, Pipeline, TrainingNode
from dagrl.model_files.hf_config import read_config

if TYPE_CHECKING:
    from dagrl.backends.base import TrainEngine


class MegatronBackend(Backend[MegatronEngineSpec]):
    """Megatron-core models."""

    name = "megatron"
    summary = "Megatron-core with TP, PP, CP, EP and DP: trains, computes log-probs and values"
    requires = ("megatron.core",)
    gpu_requires = ("transformer_engine",)
    builds_families = True
    any_layout = ANY_LAYOUT

    def validate(self, check: EngineCheck[MegatronEngineSpec]) -> None:
        nodes = check.pipeline.nodes.values()
        trained = any(isinstance(node, TrainingNode) and node.engine == check.name for node in nodes)
        if check.engine.frozen_copy_of is None:
            check_layout(check)
            if trained and not check.pipeline.run.only_validates:
                check_learning_rate(check)
        check_options(check)
        check_lora(check)
        # Providers of megatron-bridge have further fields.
        check_extra(check, open_sections=("transformer",) if check.sizes.traits.bridged else ())
        check_field_rules(check)
        check_fp8(check)

    def weight_reader(self, engine: MegatronEngineSpec) -> WeightReader | None:
        """Ranks read the folder of the model, unless they start from a Megatron folder or are a frozen copy."""
        if engine.frozen_copy_of is not None or engine.dist_checkpointing_path is not None:
            return None
        return WeightReader(engine.head)

    def start_folder(self, engine: MegatronEngineSpec) -> str | None:
        folders = (engine.dist_checkpointing_path, engine.lora.path if engine.lora else None)
        return " with ".join(str(folder) for folder in folders if folder) or None

    def owns_folder(self, folder: Path) -> bool:
        return (folder / CONFIG).is_file() or (folder / LATEST).is_file()

    def write_hf(
        self, source: Path, model: ModelSpec, output: Path, engine: MegatronEngineSpec | None = None, seed: int = 0
    ) -> None:
        from dagrl.backends.megatron.stored.convert import write_hf

        write_hf(source, model, output, engine, seed)

    def write_adapter(self, source: Path, model: ModelSpec, output: Path, engine: MegatronEngineSpec) -> None:
        from dagrl.backends.megatron.stored.convert import write_adapter

        if engine.lora is None:
            raise ValueError("the engine has no `lora`; export whole weights, without --adapter")
        if engine.head != "lm":
            raise ValueError(
                f"a {engine.head} head is no part of a PEFT folder; export whole weights, without --adapter"
            )
        write_adapter(source, model, output, engine.lora)

    def write_own(self, source: Path, output: Path) -> None:
        from dagrl.backends.megatron.stored.convert import write_megatron
        from dagrl.backends.runtime.initial_weights import weight_source
        from dagrl.model_files.library_model import load_hf_config

        model = ModelSpec(path=source)
        model_type = read_config(model).get("model_type")
        if find_family(model_type) is None:
            raise ValueError(unknown_family(str(model_type)))
        config = load_hf_config(model)
        write_megatron(weight_source(model, seed=0), config, padded_vocab_size(config.vocab_size, 1), output)

    def build(self, start: EngineStart) -> TrainEngine:
        from dagrl.backends.megatron.engine.megatron_engine import MegatronEngine

        teacher = start.pipeline.hidden_teacher_of(start.name)
        return MegatronEngine(
            start.model,
            start.section(MegatronEngineSpec),
            start.ranks,
            train_steps=start.pipeline.run.steps,
            trainable=start.trained,
            keep_start_weights=start.keeps_start_weights,
            moving_average=start.pipeline.moving_average_of(start.name),
            teacher=start.pipeline.model_of(teacher) if teacher is not None else None,
            keeps_no_cache=start.pipeline.stays_beside_sleepers(start.name),
        )

    def preload(self, engine: MegatronEngineSpec) -> None:
        import_module("dagrl.backends.megatron.engine.megatron_engine")

    def memory(self, engine: PlannedEngine[MegatronEngineSpec]) -> EngineMemory:
        on_gpu = engine.gpu is not None
        return trainer_memory(engine.shape, engine.spec, engine.executor.ranks, engine.work, on_gpu=on_gpu)

    def costs(self, engine: PlannedEngine[MegatronEngineSpec]) -> MegatronCosts:
        return MegatronCosts(engine)

    def changes(self, engine: PlannedEngine[MegatronEngineSpec], room: Room) -> Iterable[Ladder]:
        return ladders(engine, room)

    def savings(self, engine: PlannedEngine[MegatronEngineSpec]) -> Iterable[Edit]:
        return shared_prompts(engine)

    def suits_machines(self, engine: MegatronEngineSpec, group: GroupSpec) -> bool:
        slots = group.gpus_per_node or group.cpus_per_node
        return slots % engine.parallel.tp == 0

    def layouts(self, pipeline: Pipeline, shapes: Sequence[ModelShape], group: GroupSpec) -> Iterable[MegatronLayout]:
        return layouts(pipeline, shapes, group)


BACKEND = MegatronBackend()
