"""Checks of models: one source of weights, a complete folder, a suitable tokenizer, and consistent sizes.

Only small files and headers are read (`model_weights`, `tokenizer_files`): `dagrl.backends` loads the model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.backends.families.config_fields import is_size
from dagrl.backends.families.sizes import ModelSizes, sizes_of
from dagrl.config.errors import Place, removal
from dagrl.config.loading.hub import has_config_only
from dagrl.config.loading.positions import Findings
from dagrl.config.loading.published_configs import published_name
from dagrl.config.schema import ModelSpec, Pipeline, TokenizerSpec
from dagrl.model_files.hf_config import HfConfig, flat_config, folder_config, token_ids
from dagrl.validation.model_config import check_config, check_family, check_scale
from dagrl.validation.model_weights import check_weights, may_be_quantised, quantisation_problem, readers_of
from dagrl.validation.tokenizer_files import VOCABULARIES, check_tokenizer, has_tokenizer

_OWN_TOKENIZER = "take the model's own tokenizer"


def check_models(pipeline: Pipeline, findings: Findings, *, with_files: bool = True) -> dict[str, ModelSizes]:
    """Report problems of the models, their files and their sizes.

    Without `with_files`, only config.json of a folder is read. Returns the known sizes of each engine's model.
    """
    users: dict[tuple[str, ...], list[str]] = {("model",): []}
    for name in pipeline.engines:
        users.setdefault(pipeline.model_section(name), []).append(name)
    found: dict[str, ModelSizes] = {}
    for section, engines in users.items():
        declared = pipeline.engines[section[1]].model if len(section) > 1 else pipeline.model
        effective = pipeline.model_of(section[1]) if len(section) > 1 else pipeline.model
        assert declared is not None
        model = _Model(pipeline, section, declared, effective.tokenizer, engines, findings, with_files)
        config = model.check()
        if config:
            check_family(pipeline, engines, model.source, config, findings)
            if engines:
                check_scale(pipeline, engines, model.source, findings)
        found |= dict.fromkeys(engines, sizes_of(config))
    return found


@dataclass(frozen=True, slots=True)
class _Model:
    """A model, the section of the file that declares it, and the engines that use it."""

    pipeline: Pipeline
    section: tuple[str, ...]
    model: ModelSpec
    tokenizer: Path | TokenizerSpec | None
    """The model's tokenizer; an engine's model without one has the tokenizer of the pipeline's model."""
    engines: Sequence[str]
    findings: Findings
    with_files: bool

    @property
    def source(self) -> Place:
        """The place of the model's config in the file."""
        return (*self.section, "init" if self.model.init else "path")

    def check(self) -> HfConfig | None:
        """Return the fields of the model's config; None if they cannot be read or are wrong."""
        path, init, config = self.model.path, self.model.init, None
        if path is None and init is None:
            message = "says no model; add `path:` (a Hugging Face folder) or `init:` (random weights)"
            self.findings.error(self.section, message, "missing-model")
        elif path is not None and init is not None:
            message = "has `path` and `init`; keep one, and set an inherited one to null"
            self.findings.error((*self.section, "path"), message, "two-models")
        elif path is not None:
            try:
                config = self._check_folder(path)
            except OSError as error:
                message = f"{path} cannot be read ({error.strerror}); check the path and its permissions"
                self.findings.error(self.source, message, "invalid-model-folder")
        elif init is not None:
            config = self._check_init(init)
        self._check_tokenizer(config)
        return config

    def _check_folder(self, folder: Path) -> HfConfig | None:
        config: HfConfig | None = None
        try:
            config = folder_config(folder)
        except ValueError as error:
            message, name = str(error), None if folder.exists() else published_name(folder.name)
            if name:
                message = f"{folder} does not exist; set the path to {name} to fetch it, or give a Hugging Face folder"
            self.findings.error(self.source, message, "invalid-model-folder")
            if not folder.is_dir():
                return None
        path = folder / "config.json"
        config = None if config is None else flat_config(config)
        if config is not None and not check_config(self.source, config, path, self.findings):
            config = None
        problem = quantisation_problem(path, config or {})
        if problem and not may_be_quantised(self.pipeline, self.engines):
            self.findings.error(self.source, problem, "quantised-weights")
        if self.with_files:
            self._check_files(folder, config)
        return config

    def _check_files(self, folder: Path, config: HfConfig | None) -> None:
        if has_config_only(folder):
            message = f"the files of `{self.model.hub}` are not in the cache, and the hub cannot be reached"
            self.findings.error(self.source, f"{message}; connect this machine, or name a folder", "hub-unreachable")
            return
        # `dagrl run` fetches the weights of a published model.
        if self.model.hub is None or any(folder.glob("*.safetensors")):
            with self.findings.reporting(self.source, "invalid-weights"):
                check_weights(folder, config, readers_of(self.pipeline, self.engines))
        specs = [self.pipeline.engines[name] for name in self.engines]
        reads_text = len(self.section) == 1 or any(spec.generates or spec.reads_messages for spec in specs)
        if reads_text and self.model.tokenizer is None:
            self._check_tokenizer_folder(folder, "path", config)

    def _check_tokenizer_folder(self, folder: Path, key: str, config: HfConfig | None) -> None:
        place, rows = (*self.section, key), config.get("vocab_size") if config else None
        if not has_tokenizer(folder):
            message = f"{folder} has no tokenizer ({VOCABULARIES[0]}); copy it there, or name another folder"
            self.findings.error(place, message, "missing-tokenizer")
        elif self.with_files:
            with self.findings.reporting(place, "invalid-tokenizer"):
                check_tokenizer(folder, rows if is_size(rows) else None)

    def _check_init(self, init: HfConfig) -> HfConfig | None:
        if not isinstance(init.get("model_type"), str):
            message = "does not say which architecture; add `model_type:`, such as qwen3"
            self.findings.error((*self.source, "model_type"), message, "missing-model-type")
        if self.tokenizer is None:
            message = "random weights bring no tokenizer; add `tokenizer:`, such as `{kind: bytes}`"
            depends: list[Place] = [(*self.section, "tokenizer")]
            self.findings.error(self.section, message, "missing-tokenizer", depends_on=depends)
        config = flat_config(init)
        self._check_vocabulary(config.get("vocab_size"))
        return config if check_config(self.source, config, None, self.findings) else None

    def _check_vocabulary(self, rows: object) -> None:
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, TokenizerSpec) or not is_size(rows):
            return
        if rows < len(token_ids(tokenizer)):
            message = removal(f"{rows} rows cannot hold the tokenizer's {len(token_ids(tokenizer))} tokens")
            depends: list[Place] = [("model", "tokenizer"), (*self.section, "tokenizer")]
            self.findings.error((*self.source, "vocab_size"), message, "vocabulary-too-small", depends_on=depends)

    def _check_tokenizer(self, config: HfConfig | None) -> None:
        tokenizer, place = self.model.tokenizer, (*self.section, "tokenizer")
        if isinstance(tokenizer, Path):
            if os.access(tokenizer, os.R_OK | os.X_OK) and tokenizer.is_dir():
                self._check_tokenizer_folder(tokenizer, "tokenizer", config)
            else:
                message = f"{tokenizer} is not a folder that can be read; give one with a Hugging Face tokenizer"
                self.findings.error(place, message, "missing-tokenizer")
        elif tokenizer is not None and config is not None and self.model.path is not None:
            rows, needed = config.get("vocab_size"), len(token_ids(tokenizer))
            if is_size(rows) and rows < needed:
                message = (
                    f"it has {needed} tokens, and the model's embedding {rows} rows (vocab_size); {_OWN_TOKENIZER}"
                )
                self.findings.error(place, message, "vocabulary-too-small")
