"""Completes arguments in the shell. Reads files of the working directory; a wrong file gives no proposals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import typer

from dagrl.config.errors import PipelineError
from dagrl.resources import data_script_names, pipeline_file, template_names


def templates(incomplete: str) -> list[str]:
    return _begun(template_names(), incomplete)


def data_sets(incomplete: str) -> list[str]:
    return _begun(data_script_names(), incomplete)


def pipelines(incomplete: str) -> list[str]:
    """Pipeline files and folders that the text may lead to, and dagrl's templates."""
    return [*_paths(incomplete, lambda path: path.suffix in (".yaml", ".yml")), *templates(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Run folders, and folders on the way to some."""
    return _paths(incomplete, lambda path: False)


def overrides(context: typer.Context, incomplete: str) -> list[str]:
    """Keys of the pipeline that the call names: ``run.steps=``, ``engines.actor.``."""
    pipeline = context.params.get("pipeline")
    if "=" in incomplete or pipeline is None:
        return []
    from dagrl.config.loading.extends import read_with_parents

    try:
        tree = read_with_parents(pipeline_file(Path(str(pipeline)).expanduser())).tree
    except (PipelineError, OSError):
        return []
    keys = _begun(_keys(tree, incomplete.rpartition(".")[0]), incomplete)
    # A shell adds a space behind a single proposal, so a section goes on with its keys.
    while len(keys) == 1 and keys[0].endswith("."):
        keys = _keys(tree, keys[0].rstrip("."))
    return keys


def engines(context: typer.Context, incomplete: str) -> list[str]:
    from dagrl.config.loading.yaml_source import read_document

    # Where the option is the last word, the run is not assigned to its parameter yet.
    folder = context.params.get("run_dir") or next(iter(context.args), "")
    try:
        tree = read_document(Path(str(folder)) / "pipeline.yaml").tree
    except (PipelineError, OSError):
        return []
    return _begun(_mapping(tree.get("engines")), incomplete)


def gpus(incomplete: str) -> list[str]:
    from dagrl.backends.planning.gpus import GPUS

    return _begun((gpu.name for gpu in GPUS), incomplete)


def _keys(tree: Mapping[str, object], prefix: str) -> list[str]:
    """The keys in a section of a pipeline: ``run.steps=`` for a value, ``run.`` for a section."""
    from dagrl.config.loading.error_messages import keys_below, value_at

    place = tuple(prefix.split(".")) if prefix else ()
    written = _mapping(value_at(tree, place))
    known = keys_below(place, dict(tree))
    begin = f"{prefix}." if prefix else ""
    sections = {key for key, is_section in known.items() if is_section}
    sections |= {key for key, value in written.items() if isinstance(value, dict)}
    return [f"{begin}{key}{'.' if key in sections else '='}" for key in dict.fromkeys((*written, *known))]


def _paths(incomplete: str, wanted: Callable[[Path], bool]) -> list[str]:
    folder, slash, begin = incomplete.rpartition("/")
    try:
        entries = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return []
    shown = (path for path in entries if path.name.startswith(begin) and (begin or not path.name.startswith(".")))
    names = ((path.name, path.is_dir(), path) for path in shown)
    return [f"{folder}{slash}{name}{'/' if is_dir else ''}" for name, is_dir, path in names if is_dir or wanted(path)]


def _begun(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
