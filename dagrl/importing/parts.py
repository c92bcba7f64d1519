"""Parts of a pipeline that the tables of several frameworks write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from dagrl.config.loading.prompt_files import ENDINGS
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Rule, Translation, joint
from dagrl.validation.unused_options import OF_TRACKERS

_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
DAPO = "; rewards are 1 and 0 here, 1 and -1 for DAPO's and AIME's data there"
_SLICE = re.compile(r"@\[[^\[\]]*\]$")
"""Names of columns in frameworks."""
_READABLE = tuple(ending for kind in ENDINGS for ending in kind)
DATA_ENDING = re.compile(r"\.(parquet|jsonl?|ndjson|arrow|feather|ipc|csv|tsv)(\.gz)?$")
"""Endings of data files, including formats that must be converted."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def data_file(value: object) -> object:
    """The name of a data file if dagrl reads its format, otherwise of a parquet file."""
    if not isinstance(value, str):
        return value
    name = _SLICE.sub("", value)
    return name if name.endswith(_READABLE) else parquet_file(name)


def parquet_file(value: object) -> object:
    """The parquet file for a data file: others are converted once, to the same name."""
    if not isinstance(value, str):
        return value
    name = DATA_ENDING.sub("", _SLICE.sub("", value).rstrip("/"))
    return name and f"{name}.parquet"


def write_files(
    t: Translation,
    target: str,
    files: Sequence[object],
    key: str,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    note: str = "",
) -> None:
    """Write the files of ``data.train`` or of a set of ``data.val``: one, or a list of several.

    `columns`: settings that name a column -> the source's key for it. They are written unless they are the default
    column.
    """
    files = [file for file in files if file is not None]
    whole = [_SLICE.sub("", file) if isinstance(file, str) else file for file in files]
    paths = [data_file(file) for file in whole]
    named = {column: t.get(column) for column in columns if paths and t.get(column) not in (None, "prompt")}
    place = f"{target}.path" if named else target
    changes = ["convert it once (docs/data.md)"] * (paths != whole) + ["all rows are read"] * (whole != files)
    note = note or "; ".join(changes)
    if len(paths) < 2 or any(isinstance(path, Unresolved) for path in paths):
        t.write(place, paths[0] if paths else None, key, note=note)
        if len(paths) > 1:
            t.note(key, place, f"some of the {len(paths)} files are not known; the first one is used instead")
    else:
        t.write(place, paths, key, note=note)
    for column in named:
        t.write(f"{target}.{columns[column]}", named[column], column)


def write_epochs(t: Translation, key: str) -> None:
    """Write ``run.epochs``, unless the source gives a number of steps."""
    epochs = t.get(key)
    if isinstance(epochs, Unresolved):
        t.write("run.steps", epochs, key)
    elif t.number(key, 0) > 0:
        note = "here the last step is filled up; there each epoch drops its incomplete last batch"
        t.write("run.epochs", epochs, key, note=note)
    else:
        t.note(key, "run.steps", "the source gives neither steps nor epochs", epochs)


def name_of(value: object) -> str:
    """A name of a run, with other characters replaced."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[:200]
    return name if _NAME.fullmatch(name) else "imported"


def trackers(t: Translation, values: Iterable[object], keys: Iterable[str], settings: Mapping[str, str]) -> None:
    """Write ``track``; unknown trackers are refused.

    `settings` maps keys of a tracker's section to keys of the source: ``project``, ``name`` and so on.
    """
    names = {"stdout": "console", "console": "console", "file": None}
    known = ("console", "tensorboard", "wandb", "mlflow", "swanlab")
    wanted = [names.get(str(value), str(value)) for value in values]
    missing = [name for name in wanted if name and name not in known]
    given = {name: source for name, source in settings.items() if t.get(source) not in (None, "")}
    if "name" in given and str(t.get(given["name"])) == t.tree.get("name"):
        del given["name"]
    track: dict[str, object] = {"console": "console"}
    used = [*keys]
    for tracker in (name for name in wanted if name in known):
        own = {name: source for name, source in given.items() if tracker in OF_TRACKERS.get(name, ())}
        used += own.values()
        section = {name: str(t.get(item)) for name, item in own.items() if not isinstance(t.get(item), Unresolved)}
        track[tracker] = {"tracker": tracker, **section} if section else tracker
    note = f"no {', '.join(missing)}" if missing else ""
    t.write("track", list(track.values()), *dict.fromkeys(used), note=note)


def named(key: str) -> Rule:
    return joint(key, always=True)(lambda t: t.write("name", name_of(t.get(key)), key))


def tracked(key: str, **settings: str) -> Rule:
    """Write ``track``: one tracker, or a list of them, with the keys of their settings."""

    @joint(key, *settings.values(), always=True)
    def rule(t: Translation) -> None:
        value = t.get(key)
        trackers(t, as_list(value), [key], settings)

    return rule


def kept(key: str) -> Rule:
    """Write the number of kept checkpoints, if any are kept: all if the framework has no limit."""

    @joint(key, always=True)
    def rule(t: Translation) -> None:
        if isinstance(t.get(key), Unresolved):
            t.write("run.keep", t.get(key), key)
        elif "run.save_every" in t.tree:
            t.write("run.keep", t.number(key) or "all", key, note="" if t.number(key) else "there, all are kept")

    return rule


def has_val_data(t: Translation) -> bool:
    return any(key == "data.val" or key.startswith("data.val.") for key in t.tree)


def val_label(text: str, index: int) -> str:
    """A name for one of several validation sets."""
    label = re.sub(r"\W", "_", text.lower())
    return label if label[:1].isalpha() else f"set_{index}"


def write_val_n(t: Translation, key: str) -> None:
    t.copy(key, "nodes.rollout.val_n", above=1)


def as_list(value: object) -> list[object]:
    """Return a value as a list; null becomes an empty one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def padded_rows(t: Translation, target: str, rows: float, key: str) -> None:
    """Write ``tokens_per_micro_batch`` for rows that are padded to the longest prompt and response."""
    prompt, response = t.tree.get("data.max_prompt_tokens"), t.tree.get("nodes.rollout.sampling.max_new_tokens")
    if isinstance(prompt, int) and isinstance(response, int):
        note = f"{rows} rows of up to {prompt} + {response} tokens"
        t.write(target, int(rows) * (prompt + response), key, note=note)


def put_node(t: Translation, node: str, op: str, engine: str) -> None:
    t.put(f"nodes.{node}.op", op)
    t.put(f"nodes.{node}.engine", engine)


def kl_estimator(name: object) -> str | None:
    """Dagrl's name of an estimator of the divergence; ``low_var_kl`` is ``k3`` with the same bound."""
    text = str(name)
    base = _KL_ESTIMATORS.get(text.removesuffix("+"))
    return None if base is None else base + ("+" if text.endswith("+") and base != "k2" else "")


def refuse_lower_bound(t: Translation, low: float, *keys: str) -> None:
    """Refuse a lower bound of CISPO's weights, 1 less `low`, at the first of the keys that the source sets.

    Most scripts set it out of reach.
    """
    if low < 1 and (key := t.first(*keys)):
        t.refuse(f"weights have a lower bound there, {1 - low:g}, and none here", key)


def put_logprob(t: Translation, node: str, engine: str, column: str) -> None:
    for key, value in (("op", "logprob"), ("engine", engine), ("write", column)):
        t.put(f"nodes.{node}.{key}", value)


def put_reference(t: Translation) -> None:
    """Put the reference, on the actor's ranks as its frozen copy, if a divergence is in loss or reward."""
    charge = "nodes.advantage.kl_in_reward"
    if t.tree.get(f"{charge}.coef") == 0:
        for target in [key for key in t.tree if key.startswith(f"{charge}.")]:
            t.drop(target, "a divergence of weight 0 changes nothing")
    if t.tree.get("nodes.update.loss.kl_coef") or t.tree.get("nodes.advantage.kl_in_reward.coef"):
        t.put("engines.reference.backend", "megatron")
        t.put("engines.reference.frozen_copy_of", "actor")
        put_logprob(t, "ref", "reference", "ref_logprob")


def put_groups(t: Translation, groups: dict[str, tuple[int, int]]) -> None:
    """Write groups: name -> (nodes, GPUs on each)."""
    for name, (nodes, gpus) in groups.items():
        if nodes > 1:
            t.put(f"groups.{name}.nodes", nodes)
        t.put(f"groups.{name}.gpus_per_node", gpus)


def first_group(t: Translation, name: str, nodes: str, gpus: str) -> None:
    """Write the trainer's group, whose nodes and GPUs on each are settings, and put the actor into it."""
    t.put(f"groups.{name}.gpus_per_node", 8)
    if t.get(nodes) != 1:
        t.copy(nodes, f"groups.{name}.nodes")
    t.copy(gpus, f"groups.{name}.gpus_per_node")
    t.put("engines.actor.group", name)
