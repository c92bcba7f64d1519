"""Imports megatron-bridge when a pipeline asks for it, without its log output, with or without Transformer Engine.

The import takes seconds, because it imports about a hundred model families.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import torch

from dagrl.backends.megatron.engine.quiet import drop_records

_NOISE = (
    # Logs a traceback for each optional kernel library.
    ("megatron.bridge.utils.import_utils", "failed with: Traceback"),
    # Logs an error when it compares names before loading.
    ("megatron.bridge.models.conversion.model_bridge", "in hf_keys"),
    # Its defaults are not used.
    ("megatron.bridge.utils.fusions", "Fusion disabled"),
    # Between Megatron and megatron-bridge's layer specs.
    ("megatron.core.transformer.transformer_layer", "Rewrapping ModuleSpec"),
    ("transformers.configuration_utils", "`torch_dtype` is deprecated"),
)
_LOOK_FOR_TRANSFORMER_ENGINE = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.vision.clip_vit_model",
    "megatron.core.ssm.mamba_context_parallel",
)
"""Modules of Megatron that megatron-bridge may import first, and that check for optional libraries then."""


def import_bridge() -> ModuleType:
    return _import("dagrl.backends.megatron.engine.bridge_source")


def import_peft() -> ModuleType:
    return _import("megatron.bridge.peft.lora")


def _import(module: str) -> ModuleType:
    for logger, text in _NOISE:
        drop_records(logger, text)
    if not torch.cuda.is_available():
        from dagrl.backends.megatron.engine.cpu.gated_delta import use_plain_kernels
        from dagrl.backends.megatron.engine.cpu.modules import use_plain_modules

        # Its layer specs take the classes that Megatron has for Transformer Engine's when they are imported.
        use_plain_modules()
        use_plain_kernels()
    with _quiet(), _transformer_engine_importable():
        return importlib.import_module(module)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which imports neither log nor change the logging configuration."""
    root, handler = logging.getLogger(), logging.NullHandler()
    # Megatron's training script, which is imported too, configures logging unless it has a handler.
    root.addHandler(handler)
    try:
        with warnings.catch_warnings():
            # For unused models that need Transformer Engine.
            warnings.filterwarnings("ignore", "Only transformer-engine>=1.7.0 supports MoE experts", UserWarning)
            yield
    finally:
        root.removeHandler(handler)


@contextmanager
def _transformer_engine_importable() -> Iterator[None]:
    """Context in which Transformer Engine can be imported, as an empty placeholder if necessary.

    Two modules of megatron-bridge need it at import, for classes that are not used here.
    """
    if find_spec("transformer_engine") is not None:
        yield
        return
    for name in _LOOK_FOR_TRANSFORMER_ENGINE:
        importlib.import_module(name)
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    # Megatron's default version without Transformer Engine. It caches the answer.
    package.__version__ = "0.0.0"  # type: ignore[attr-defined]
    package.pytorch = pytorch  # type: ignore[attr-defined]
    pytorch.TransformerLayer = torch.nn.Module  # type: ignore[attr-defined]
    pytorch.ops = SimpleNamespace(Sequential=torch.nn.Sequential)  # type: ignore[attr-defined]
    stand_ins = {module.__name__: module for module in (package, pytorch)}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
