"""Finds in the installed libraries which models they know. Their registries are read as text: nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dagrl.backends.environments import made_environments
from dagrl.backends.registry import backends
from dagrl.backends.tested import version_of
from dagrl.doctor.findings import Finding, hint, ok
from dagrl.model_files.library_classes import source_of


def libraries(model_type: str, architectures: list[str], *, on_gpus: bool) -> Iterator[Finding]:
    """Yield what the transformers, SGLang and vLLM of each environment know of a model."""
    seen = set()
    for name, environment in {"": None, **made_environments()}.items():
        where = f", in the environment `{name}`" if name else ""
        if (version := version_of("transformers", environment)) and version not in seen:
            seen.add(version)
            judge, words = (ok, "knows") if _has_config(model_type, environment) else (hint, "does not know")
            yield judge(f"transformers {version}", f"{words} the model type {model_type}{where}")
        for backend in backends().values():
            tested = backend.tested
            installed = tested and next(
                filter(None, (version_of(name, environment) for name in tested.distributions)), ""
            )
            if not tested or not installed:
                continue
            known = [name for name in architectures if name in backend.architectures(environment)]
            text = f"has {known[0]}" if known else f"does not implement {' or '.join(architectures) or 'this model'}"
            problem = tested.problem(environment, on_gpus=on_gpus)
            judge = ok if known and not problem else hint
            yield judge(f"{tested.title} {installed}", f"{text}{where}" + (f"; {problem}" if problem else ""))


def _has_config(model_type: str, environment: Path | None) -> bool:
    files = ("auto_mappings.py", "configuration_auto.py")
    texts = (source_of("transformers", f"models/auto/{file}", environment) or "" for file in files)
    return any(re.search(rf'\("{re.escape(model_type)}", "\w+Config"\)', text) for text in texts)
