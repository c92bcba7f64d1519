"""Finds in the installed libraries which models they know. Their registries are read as text: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dagrl.backends.environments import made_environments
from dagrl.backends.registry import backends
from dagrl.backends.tested import version_of
from dagrl.doctor.findings import Finding, hint, ok
from dagrl.model_files.library_classes import folders_of, source_of

_VLLM_MODELS = re.compile(r"^_(?:TEXT_GENERATION|MULTIMODAL|TRANSFORMERS_SUPPORTED)_MODELS.*?^\}", re.DOTALL | re.M)
_SGLANG_MODELS = re.compile(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def libraries(model_type: str, architectures: list[str], *, on_gpus: bool) -> Iterator[Finding]:
    """Yield what the transformers, SGLang and vLLM of each environment know of a model."""
    seen = set()
    for name, environment in {"": None, **made_environments()}.items():
        where = f", in the environment `{name}`" if name else ""
        if (version := version_of("transformers", environment)) and version not in seen:
            seen.add(version)
            judge, words = (ok, "knows") if _has_config(model_type, environment) else (hint, "does not know")
            yield judge(f"transformers {version}", f"{words} the model type {model_type}{where}")
        for server, architectures_of in _SERVERS.items():
            tested = backends()[server].tested
            installed = tested and next(
                filter(None, (version_of(each, environment) for each in tested.distributions)), ""
            )
            if not tested or not installed:
                continue
            known = [each for each in architectures if each in architectures_of(environment)]
            text = f"has {known[0]}" if known else f"has no {' or '.join(architectures) or 'class'} of its own"
            problem = tested.problem(environment, on_gpus=on_gpus)
            judge = ok if known and not problem else hint
            yield judge(f"{tested.title} {installed}", f"{text}{where}" + (f"; {problem}" if problem else ""))


def _has_config(model_type: str, environment: Path | None) -> bool:
    files = ("auto_mappings.py", "configuration_auto.py")
    texts = (source_of("transformers", f"models/auto/{file}", environment) or "" for file in files)
    return any(re.search(rf'\("{re.escape(model_type)}", "\w+Config"\)', text) for text in texts)


def _sglang_architectures(environment: Path | None) -> set[str]:
    names: set[str] = set()
    for path in (each for folder in folders_of("sglang", environment) for each in folder.glob("srt/models/*.py")):
        classes = _SGLANG_MODELS.findall(path.read_text(encoding="utf-8"))
        names.update(name for found in classes for name in re.findall(r"\w+", found))
    return names


def _vllm_architectures(environment: Path | None) -> set[str]:
    source = source_of("vllm", "model_executor/models/registry.py", environment) or ""
    return {name for block in _VLLM_MODELS.findall(source) for name in re.findall(r'^\s+"(\w+)": ?\(', block, re.M)}


_SERVERS = {"sglang": _sglang_architectures, "vllm": _vllm_architectures}
"""Backend -> the classes of Hugging Face's models that its library has code for."""
