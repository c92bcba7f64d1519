"""Parts of a pipeline that the tables of several frameworks write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from dagrl.config.schema.backends import engine_sections
from dagrl.config.schema.library_fields import LibraryFields
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Rule, Translation

STANDS_IN_STEPS = 1000
"""``run.steps`` where it depends on a data file that is not here."""
SERVER = "engines.generator.server"
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
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def server_key(t: Translation, name: str) -> str:
    """The generator's key for something that SGLang and vLLM name differently."""
    return f"{SERVER}.{_SERVER_NAMES[str(t.tree['engines.generator.backend'])][name]}"


def generator(t: Translation, backend: str, *keys: str) -> None:
    """Write the generator's backend."""
    put_generator(t, backend)
    t.write("engines.generator.backend", backend, *keys)


def put_generator(t: Translation, backend: str) -> None:
    """Put the generator; vLLM runs in an environment of its own."""
    t.put("engines.generator.backend", backend)
    t.put("engines.generator.weights_from", "actor")
    if backend == "vllm":
        t.put("engines.generator.environment", "vllm")


def _tested_fields(backend: str, section: str) -> type[LibraryFields]:
    table = engine_sections()[backend].model_fields[section].annotation
    assert isinstance(table, type)
    assert issubclass(table, LibraryFields)
    return table


def library_field(t: Translation, key: str, engine: str, section: str, field: str) -> None:
    """Write a field of a library's configuration under its own name, untested ones under ``extra``."""
    fields = _tested_fields(str(t.tree[f"engines.{engine}.backend"]), section)
    value = t.get(key)
    if field in fields.refused:
        t.refuse(f"`{field}` {fields.refused[field]}".replace("; remove it", ""), key)
    elif value is None:
        t.imply("is null, as by default", key)
    elif field in fields.model_fields:
        t.write(f"engines.{engine}.{section}.{field}", value, key)
    else:
        t.write(f"engines.{engine}.extra.{section}.{field}", value, key, note="untested with dagrl")


def library_fields(pattern: str, engine: str, section: str) -> Rule:
    """Fields of a library's configuration that the source names after a prefix: ``prefix.*``."""
    prefix = pattern.removesuffix("*")

    def apply(t: Translation) -> None:
        for key in t.current:
            if f"engines.{engine}.backend" in t.tree:
                library_field(t, key, engine, section, key.removeprefix(prefix))
            else:
                t.imply(f"there is no engine `{engine}`", key)

    return Rule((pattern,), apply, (f"engines.{engine}.{section}", f"engines.{engine}.extra.{section}"))


def data_file(value: Any) -> Any:
    """The parquet file for a data file: others are converted once, to the same name."""
    if not isinstance(value, str):
        return value
    name = value.partition("@")[0]
    suffix = PurePosixPath(name).suffix
    if suffix in (".jsonl", ".json", ".csv"):
        return str(PurePosixPath(name).with_suffix(".parquet"))
    return name if suffix == ".parquet" else f"{name.rstrip('/')}.parquet" if name else name


def rows_of(t: Translation, path: Any) -> int | None:
    """The rows of a parquet file that is here."""
    if not isinstance(path, str) or t.folder is None:
        return None
    found = t.folder / Path(path).expanduser()
    if not found.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(found).num_rows)
    except (OSError, pa.ArrowException):
        return None


def steps_of_epochs(t: Translation, key: str, *others: str) -> None:
    """Write ``run.steps``: epochs x (prompts // prompts_per_step), as loaders drop the rest of an epoch."""
    epochs, prompts = t.number(key, 1), t.tree.get("data.prompts_per_step")
    rows = rows_of(t, t.tree.get("data.train"))
    if rows and isinstance(prompts, int) and rows >= prompts:
        note = f"{epochs} epochs of {rows} prompts, {prompts} in a step"
        t.write("run.steps", epochs * (rows // prompts), key, *others, note=note)
        return
    t.put("run.steps", STANDS_IN_STEPS)
    reason = f"{epochs} epochs x prompts of the file // {prompts}; the file is not here, so {STANDS_IN_STEPS} stands in"
    t.note(key, "run.steps", reason, epochs)


def name_of(value: Any) -> str:
    """A name of a run, with other characters replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:200]
    return name if NAME.fullmatch(name) else "imported"


def trackers(t: Translation, values: Iterable[Any], key: str) -> None:
    """Write ``track``; trackers that dagrl does not have are refused."""
    names = {"stdout": "console", "console": "console", "file": None}
    known = ("console", "tensorboard", "wandb", "mlflow", "swanlab")
    wanted = [names.get(str(value), str(value)) for value in values]
    track = list(dict.fromkeys(["console", *(name for name in wanted if name in known)]))
    missing = [name for name in wanted if name and name not in known]
    note = f"no {', '.join(missing)}" if missing else ""
    t.write("track", track, key, note=note)


def put_logprob(t: Translation, node: str, engine: str, column: str) -> None:
    """Put a node that computes log-probs."""
    for key, value in (("op", "logprob"), ("engine", engine), ("write", column)):
        t.put(f"nodes.{node}.{key}", value)


def put_reference(t: Translation) -> None:
    """Put the reference, on the actor's ranks as its frozen copy, if a divergence is in loss or reward."""
    if t.tree.get("nodes.update.loss.kl_coef") or t.tree.get("nodes.advantage.kl_in_reward.coef"):
        t.put("engines.reference.backend", "megatron")
        t.put("engines.reference.frozen_copy_of", "actor")
        put_logprob(t, "ref", "reference", "ref_logprob")


def is_known(value: Any) -> bool:
    """Whether a value is known, and not null."""
    return value is not None and not isinstance(value, Unresolved)


def put_groups(t: Translation, groups: dict[str, tuple[int, int]]) -> None:
    """Write groups: name -> (nodes, GPUs on each)."""
    for name, (nodes, gpus) in groups.items():
        if nodes > 1:
            t.put(f"groups.{name}.nodes", nodes)
        t.put(f"groups.{name}.gpus_per_node", gpus)
