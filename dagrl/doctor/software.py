"""Python and its packages: those that every run needs, those that GPUs need, those that some pipelines use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dagrl.doctor.findings import Line, hint, missing, ok
from dagrl.doctor.probe import Edges

_PYTHON = (3, 12)
_TRIED = ("torch", "ray", "megatron.core", "transformers", "transformer_engine", "apex", "sglang")
_OF_ALL_RUNS = ("torch", "ray", "megatron.core", "transformers")


def software(edges: Edges, *, on_gpus: bool) -> Iterator[Line]:
    """Lines on what is installed. Slow: libraries are imported, in another process."""
    version = ".".join(map(str, edges.python()))
    if edges.python()[:2] == _PYTHON:
        yield ok("Python", version)
    else:
        yield missing("Python", f"{version}; dagrl needs {'.'.join(map(str, _PYTHON))}")
    yield from _pinned(edges)
    for name, told in edges.imports(*_TRIED):
        yield from _imported(name, told, on_gpus=on_gpus)


def _imported(name: str, told: dict[str, Any], *, on_gpus: bool) -> Iterator[Line]:
    """Lines on a library that was imported, or could not be."""
    error = told.get("error")
    if name in _OF_ALL_RUNS:
        if error:
            yield missing(name, f"cannot be imported: {error}; `make setup` installs it")
        else:
            yield ok(f"import {name}", told.get("version") or "there")
        if name == "torch":
            yield from _cuda(told, on_gpus=on_gpus)
    elif name == "transformer_engine" and on_gpus:
        needed = f"{error}; Megatron needs Transformer Engine on GPUs (see the Dockerfile)"
        yield missing(name, needed) if error else ok(name, "there")
    elif name == "apex" and on_gpus and error:
        yield hint(name, "not there; Megatron's fused gradient accumulation is left out")
    elif name == "sglang":
        yield hint(name, f"{error}; only `backend: sglang` needs it") if error else ok(name, "there")


def _pinned(edges: Edges) -> list[Line]:
    """Packages against the versions that dagrl says it works with."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return [missing("packaging", "not installed; `make setup` installs it")]
    lines = []
    for text in edges.requirements():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = edges.version(wanted.name)
        if version is None:
            lines.append(missing(wanted.name, f"not installed; dagrl needs {wanted.specifier or 'it'}: `make setup`"))
        elif not wanted.specifier.contains(version, prereleases=True):
            lines.append(missing(wanted.name, f"{version}; dagrl needs {wanted.specifier}: `make setup`"))
        else:
            lines.append(ok(wanted.name, version))
    return lines or [hint("dagrl", "is not installed as a package, so its requirements are not known")]


def _cuda(torch: dict, *, on_gpus: bool) -> list[Line]:
    if "error" in torch or not on_gpus:
        return []
    if not torch.get("available"):
        built = f"built for CUDA {torch['cuda']}" if torch.get("cuda") else "built without CUDA"
        return [missing("torch and CUDA", f"there are GPUs and torch, {built}, sees none; is the driver old enough?")]
    lines = [ok("torch and CUDA", f"CUDA {torch['cuda']}, {torch['count']} GPUs")]
    if not torch.get("nccl"):
        lines.append(missing("NCCL", "torch is built without it; install torch from PyPI"))
    return lines
