"""Engines that the tables of several frameworks write."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dagrl.backends.environments import made_environments
from dagrl.backends.extra_fields import lacking_field
from dagrl.config.errors import Removal
from dagrl.config.schema.backends import engine_sections
from dagrl.config.schema.library_fields import LibraryFields
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Rule, Translation, is_known, joint

FSDP = "belongs to FSDP: trainers are Megatron-core here, split by `engines.NAME.parallel`; see `dagrl plan --search`"
PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Megatron's sizes of a layout."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Megatron's fields for full recomputation."""
_SERVER = "engines.generator.server"
_SERVER_NAMES = {
    "sglang": {
        "tensor_parallel": "tp_size",
        "memory": "mem_fraction_static",
        "requests": "max_running_requests",
        "eager": "disable_cuda_graph",
        "length": "context_length",
    },
    "vllm": {
        "tensor_parallel": "tensor_parallel_size",
        "memory": "gpu_memory_utilization",
        "requests": "max_num_seqs",
        "eager": "enforce_eager",
        "length": "max_model_len",
    },
}


def server_key(t: Translation, name: str) -> str:
    """The generator's key of an option that SGLang and vLLM name differently."""
    return f"{_SERVER}.{_SERVER_NAMES[str(t.tree['engines.generator.backend'])][name]}"


def put_generator(t: Translation, backend: str) -> None:
    """Put the generator; vLLM runs in a separate environment."""
    t.put("engines.generator.backend", backend)
    t.put("engines.generator.weights_from", "actor")
    if backend == "vllm":
        target = "engines.generator.environment"
        t.put(target, "vllm")
        if "vllm" not in made_environments():
            t.note(target, target, "vLLM needs its own: make it (docs/vllm.md), or take SGLang", "vllm")


def generator_of(t: Translation, key: str) -> None:
    """Write the backend that a key names; SGLang replaces servers that dagrl does not support."""
    name = t.get(key)
    put_generator(t, name if name in ("vllm", "sglang") else "sglang")
    if name in ("vllm", "sglang"):
        t.copy(key, "engines.generator.backend")
    else:
        t.refuse("generators are SGLang, vLLM and, for small models, transformers; sglang is used instead", key)


def _tested_fields(backend: str, section: str) -> type[LibraryFields]:
    table = engine_sections()[backend].model_fields[section].annotation
    assert isinstance(table, type)
    assert issubclass(table, LibraryFields)
    return table


def library_field(t: Translation, key: str, engine: str, section: str, field: str) -> None:
    """Write a field of a library's configuration under its own name, an untested one under ``extra``."""
    fields = _tested_fields(str(t.tree[f"engines.{engine}.backend"]), section)
    value = t.get(key)
    if field in fields.refused:
        reason = fields.refused[field]
        t.refuse(f"`{field}` {reason.why if isinstance(reason, Removal) else reason}", key)
    elif value is None:
        return
    elif field in fields.model_fields:
        _tested_field(t, key, fields, f"engines.{engine}.{section}.{field}")
    elif lack := lacking_field(fields, field, _environment_of(t, engine)):
        t.refuse(lack, key)
    else:
        t.write(f"engines.{engine}.extra.{section}.{field}", value, key, note="untested with dagrl")


def _tested_field(t: Translation, key: str, fields: type[LibraryFields], target: str) -> None:
    """Write a field if its value is one that the table knows; a text may stand for a list."""
    value, tested = t.get(key), TypeAdapter(fields)
    listed = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    for form in (value, listed):
        try:
            tested.validate_python({target.rpartition(".")[2]: form})
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
        else:
            t.write(target, form, key)
            return
    if isinstance(value, Unresolved):
        t.write(target, value, key)
    else:
        t.refuse(f"dagrl does not take this value: {fault[:1].lower()}{fault[1:]}", key)


def write_layout(t: Translation, engine: str, section: str) -> None:
    """Write Megatron's sizes of a section; sequence parallelism has no effect on one tensor-parallel rank."""
    for size in PARALLEL:
        if is_known(t.get(f"{section}.{size}")):
            t.copy(f"{section}.{size}", f"engines.{engine}.parallel.{size}")
    sequence_parallel(t, engine, f"{section}.sequence_parallel", f"{section}.{PARALLEL[0]}")


def sequence_parallel(t: Translation, engine: str, key: str, tensor: str) -> None:
    """Write Megatron's sequence parallelism, unless there is one tensor-parallel rank."""
    if t.number(tensor, 1) > 1 or isinstance(t.get(tensor), Unresolved):
        t.copy(key, f"engines.{engine}.parallel.sequence_parallel")


def _environment_of(t: Translation, engine: str) -> Path | None:
    return made_environments().get(str(t.tree.get(f"engines.{engine}.environment")))


def library_fields(pattern: str, engine: str, section: str) -> Rule:
    """Fields of a library's configuration that the source names after a prefix: ``prefix.*``."""
    prefix = pattern.removesuffix("*")

    @joint(pattern)
    def rule(t: Translation) -> None:
        for key in t.current:
            if f"engines.{engine}.backend" in t.tree:
                library_field(t, key, engine, section, key.removeprefix(prefix))

    return rule


def write_betas(t: Translation, engine: str, key: str) -> None:
    betas = t.get(key)
    if isinstance(betas, list) and len(betas) == 2:
        for name, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            t.write(f"engines.{engine}.optimizer.{name}", beta, key)


def write_shape(t: Translation, engine: str, key: str, default: str | None = None) -> bool:
    """Write the shape of the learning rate if Megatron supports it; returns whether it does."""
    style = t.get(key, default)
    if not isinstance(style, Unresolved) and style not in ("constant", "linear", "cosine", "inverse-square-root"):
        t.refuse("shapes are constant, linear, cosine and inverse-square-root", key)
        return False
    t.write(f"engines.{engine}.lr_schedule.lr_decay_style", style, key)
    return True


def write_steps(t: Translation, engine: str, target: str, key: str, steps: int) -> None:
    """Write a length that the source gives in optimizer steps; a step here has `steps` of them."""
    if t.number(key, 0) > 0:
        note = f"optimizer steps there, {steps} a step" if steps > 1 else ""
        t.write(f"engines.{engine}.lr_schedule.{target}", -(-int(t.get(key)) // steps), key, note=note)


def write_warmup_ratio(t: Translation, engine: str, key: str) -> None:
    """Write a warm-up that is a fraction of the decay: by default of the run, of any length."""
    schedule = f"engines.{engine}.lr_schedule"
    ratio, end = t.number(key), t.tree.get(f"{schedule}.lr_decay_steps")
    if ratio and end:
        t.write(f"{schedule}.lr_warmup_steps", int(ratio * end), key, note=f"of the {end} steps of the decay")
    elif ratio:
        t.write(f"{schedule}.lr_warmup_ratio", ratio, key)


def put_critic(t: Translation) -> None:
    """Put the critic: an engine with a value head, and the nodes that compute values and train it."""
    t.put("engines.critic.backend", "megatron")
    t.put("engines.critic.head", "value")
    for node in ("values", "critic"):
        t.put(f"nodes.{node}.op", node)
        t.put(f"nodes.{node}.engine", "critic")


def critic_model(t: Translation, key: str, policy: str) -> None:
    """Write the critic's model, unless it is the policy's."""
    if t.get(key) not in ("", t.get(policy)):
        t.copy(key, "engines.critic.model.path")


def like_the_actor(t: Translation, engine: str) -> None:
    """Give an engine the actor's layout and Megatron's fields."""
    for target, value in list(t.tree.items()):
        if target.startswith(("engines.actor.parallel.", "engines.actor.transformer.")):
            t.put(target.replace("engines.actor.", f"engines.{engine}.", 1), value)
