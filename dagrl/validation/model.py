"""Models: one source of weights, a whole folder, a tokenizer that makes sense, and sizes that fit each other.

Only small files and headers are read (`model_weights`, `tokenizer_files`): `dagrl.backends` loads the model.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.backends.backend import WeightReader
from dagrl.backends.families.config_fields import is_size
from dagrl.backends.families.sizes import ModelSizes, sizes_of
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import EngineSpec, ModelSpec, Pipeline, TokenizerSpec
from dagrl.validation.json_files import json_object
from dagrl.validation.model_config import check_config, check_family, check_scale
from dagrl.validation.model_weights import (
    may_be_quantised,
    quantisation_problem,
    readers_of,
    weights_problem,
)
from dagrl.validation.tokenizer_files import VOCABULARIES, has_tokenizer, tokenizer_problems


def check_models(pipeline: Pipeline, findings: Findings, *, with_files: bool = True) -> dict[str, ModelSizes]:
    """Report what is wrong with the models, the files that they name, and their sizes.

    Without `with_files`, only config.json of a folder is looked at. Returns the sizes of each engine's model, as far as
    they are known.
    """
    users: dict[tuple[str, ...], list[str]] = {("model",): []}
    for name in pipeline.engines:
        users.setdefault(pipeline.model_section(name), []).append(name)
    found: dict[str, ModelSizes] = {}
    for section, engines in users.items():
        declared = pipeline.engines[section[1]].model if len(section) > 1 else pipeline.model
        effective = pipeline.model_of(section[1]) if len(section) > 1 else pipeline.model
        assert declared is not None
        reads_text = len(section) == 1 or any(_reads_text(pipeline.engines[name]) for name in engines)
        use = _Use(readers_of(pipeline, engines), reads_text, may_be_quantised(pipeline, engines))
        model = _Model(section, declared, effective.tokenizer, findings, use)
        config = model.check(with_files=with_files)
        if config:
            check_family(pipeline, engines, model.said_at, config, findings)
            check_scale(pipeline, engines, model.said_at, findings)
        found |= dict.fromkeys(engines, sizes_of(config))
    return found


def _reads_text(engine: EngineSpec) -> bool:
    return engine.generates or engine.reads_messages


@dataclass(frozen=True, slots=True)
class _Use:
    """How a model's engines use its folder."""

    readers: Sequence[WeightReader]
    """How they read its weights."""
    reads_text: bool
    """Whether an engine makes tokens of text with a tokenizer of its own."""
    may_be_quantised: bool


class _Model:
    """A model, the section of the file that says it, and where to report."""

    def __init__(
        self,
        section: tuple[str, ...],
        model: ModelSpec,
        tokenizer: Path | TokenizerSpec | None,
        findings: Findings,
        use: _Use,
    ) -> None:
        """`tokenizer`: its own, or the one that it takes where it is an engine's and names none."""
        self._section = section
        self._model = model
        self._tokenizer = tokenizer
        self._findings = findings
        self._use = use

    @property
    def said_at(self) -> Place:
        """Where the file says the model's config."""
        return (*self._section, "init" if self._model.init else "path")

    def check(self, *, with_files: bool) -> Mapping[str, Any] | None:
        """The fields of the model's Hugging Face config that are known; None where they cannot be read or are wrong."""
        model, path = self._model, (*self._section, "path")
        config = None
        if model.path is None and model.init is None:
            message = "says no model; add `path:` (a Hugging Face folder) or `init:` (random weights)"
            self._findings.error(self._section, message)
        elif model.path is not None and model.init is not None:
            self._findings.error(path, "has `path` and `init`; keep one, and set an inherited one to null")
        elif model.path is not None:
            try:
                config = self._check_folder(model.path, with_files=with_files)
            except OSError as error:
                message = f"{model.path} cannot be read ({error.strerror}); check the path and its permissions"
                self._findings.error(path, message)
        else:
            config = self._check_init()
        self._check_tokenizer(config, with_files=with_files)
        return config

    def _check_folder(self, folder: Path, *, with_files: bool) -> Mapping[str, Any] | None:
        """The folder's config.json, if it can be read."""
        place = (*self._section, "path")
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            remedy = "give a Hugging Face folder (`hf download NAME --local-dir DIR` makes one)"
            self._findings.error(place, f"{folder} {what}; {remedy}")
            return None
        config = self._read_config(folder)
        problem = quantisation_problem(folder / "config.json", config or {})
        if problem and not self._use.may_be_quantised:
            self._findings.error(place, problem)
        if with_files:
            if problem := weights_problem(folder, config, self._use.readers):
                self._findings.error(place, problem)
            if self._use.reads_text and self._model.tokenizer is None:
                self._check_own_tokenizer(folder, config)
            if (path := folder / "generation_config.json").is_file() and json_object(path) is None:
                self._findings.error(place, f"{path} is not a JSON object; copy the file again")
        return config

    def _read_config(self, folder: Path) -> Mapping[str, Any] | None:
        """The content of config.json, if it can be read and is right."""
        place, path = (*self._section, "path"), folder / "config.json"
        if not path.is_file():
            message = f"{folder} has no config.json; give the folder that holds the model's Hugging Face files"
            self._findings.error(place, message)
            return None
        config = json_object(path)
        if config is None:
            self._findings.error(place, f"{path} is not a JSON object; copy the file again")
            return None
        return config if self._says_what_it_is(path, config) else None

    def _check_own_tokenizer(self, folder: Path, config: Mapping[str, Any] | None) -> None:
        place = (*self._section, "path")
        if not has_tokenizer(folder):
            files = ", ".join(VOCABULARIES[:2])
            self._findings.error(place, f"{folder} has no tokenizer ({files}); copy it there, or add `tokenizer:`")
            return
        for problem in tokenizer_problems(folder, _rows(config)):
            self._findings.error(place, problem)

    def _says_what_it_is(self, path: Path, config: Mapping[str, Any]) -> bool:
        place = (*self._section, "path")
        if not isinstance(config.get("model_type"), str):
            message = f"{path} names no architecture (model_type); give the folder of a Hugging Face model"
            self._findings.error(place, message)
            return False
        return check_config(self.said_at, config, path, self._findings)

    def _check_init(self) -> Mapping[str, Any] | None:
        model = self._model
        assert model.init is not None
        if not isinstance(model.init.get("model_type"), str):
            message = "does not say which architecture; add `model_type:`, such as qwen3"
            self._findings.error((*self._section, "init", "model_type"), message)
        if self._tokenizer is None:
            message = (
                "random weights bring no tokenizer; add `tokenizer:` (a folder, or `{kind: characters, alphabet: ...}`)"
            )
            self._findings.error(self._section, message, depends_on=[(*self._section, "tokenizer")])
        self._check_vocabulary(model.init)
        return model.init if check_config(self.said_at, model.init, None, self._findings) else None

    def _check_vocabulary(self, init: Mapping[str, Any]) -> None:
        tokenizer, vocabulary = self._tokenizer, init.get("vocab_size")
        if not isinstance(tokenizer, TokenizerSpec) or not is_size(vocabulary):
            return
        needed = 256 if tokenizer.kind == "bytes" else len(tokenizer.alphabet)
        if vocabulary <= needed:
            message = (
                f"{vocabulary} rows cannot hold the tokenizer's {needed} {tokenizer.kind} and its special tokens; "
                "take vocab_size out, and it is the tokenizer's"
            )
            self._findings.error(
                (*self._section, "init", "vocab_size"),
                message,
                depends_on=[("model", "tokenizer"), (*self._section, "tokenizer")],
            )

    def _check_tokenizer(self, config: Mapping[str, Any] | None, *, with_files: bool) -> None:
        tokenizer, place = self._model.tokenizer, (*self._section, "tokenizer")
        if isinstance(tokenizer, Path):
            if not os.access(tokenizer, os.R_OK | os.X_OK) or not tokenizer.is_dir():
                self._findings.error(
                    place, f"{tokenizer} is not a folder that can be read; give one with a Hugging Face tokenizer"
                )
            elif not has_tokenizer(tokenizer):
                self._findings.error(place, f"{tokenizer} has no tokenizer.json or the like; give a tokenizer's folder")
            elif with_files:
                for problem in tokenizer_problems(tokenizer, _rows(config)):
                    self._findings.error(place, problem)
        elif tokenizer is not None and tokenizer.kind == "bytes":
            if tokenizer.alphabet:
                self._findings.error((*place, "alphabet"), "a tokenizer of bytes has no alphabet; take it out")
        elif tokenizer is not None:
            if not tokenizer.alphabet:
                message = "a tokenizer of characters needs to know which; add `alphabet:` with all of them"
                self._findings.error((*place, "alphabet"), message)
            doubled = [character for character, count in Counter(tokenizer.alphabet).items() if count > 1]
            if doubled:
                shown = ", ".join(map(repr, doubled))
                self._findings.error((*place, "alphabet"), f"holds {shown} more than once; write each character once")


def _rows(config: Mapping[str, Any] | None) -> int | None:
    """Rows of the embedding, where they are known."""
    rows = config.get("vocab_size") if config else None
    return rows if is_size(rows) else None
