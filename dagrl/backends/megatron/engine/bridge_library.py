"""megatron-bridge as a library: imported when a pipeline asks for it, quietly, and with or without Transformer Engine.

It imports all of its hundred model families at once, which takes seconds, so nothing else imports it.
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

from dagrl.backends.megatron.engine.quiet import Without

_INSTALL = "uv pip install --no-deps -r requirements/bridge.txt"
_PACKAGES = ("megatron.bridge", "omegaconf", "einops")
_NOISE = (
    # Each kernel library that it can do without, with a traceback.
    ("megatron.bridge.utils.import_utils", "failed with: Traceback"),
    # Names are compared before anything is loaded, and there it is an error.
    ("megatron.bridge.models.conversion.model_bridge", "in hf_keys"),
)
_LOOK_FOR_TRANSFORMER_ENGINE = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.models.vision.clip_vit_model",
    "megatron.core.ssm.mamba_context_parallel",
)
"""Modules of megatron that megatron-bridge would be the first to import, and that ask then what they can use."""


def import_bridge() -> ModuleType:
    """Import `bridge_source` and with it megatron-bridge. ValueError if megatron-bridge is not installed."""
    if not all(find_spec(package) for package in _PACKAGES):
        raise ValueError(
            f"bridge: megatron-bridge is not installed; install it in dagrl's folder with `{_INSTALL}`, "
            "or set bridge: native"
        )
    for logger, text in _NOISE:
        logging.getLogger(logger).addFilter(Without(text))
    with _quiet(), _transformer_engine_importable():
        return importlib.import_module("dagrl.backends.megatron.engine.bridge_source")


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the context what is imported neither logs nor changes how the process logs."""
    root, handler = logging.getLogger(), logging.NullHandler()
    # Megatron's training script, which is imported too, sets up logging for all: not where somebody has already.
    root.addHandler(handler)
    try:
        with warnings.catch_warnings():
            # Models that are not used here, built for a Transformer Engine that is not there.
            warnings.filterwarnings("ignore", "Only transformer-engine>=1.7.0 supports MoE experts", UserWarning)
            yield
    finally:
        root.removeHandler(handler)


@contextmanager
def _transformer_engine_importable() -> Iterator[None]:
    """Within the context Transformer Engine can be imported, if need be as a stand-in that holds nothing of use.

    Two of megatron-bridge's modules take it for granted when they are imported: low-rank adapters, whose annotations
    name its classes, and a layer that inherits from its. Neither is used here. Afterwards the stand-in is gone, and
    megatron is what it was.
    """
    if find_spec("transformer_engine") is not None:
        yield
        return
    for name in _LOOK_FOR_TRANSFORMER_ENGINE:
        importlib.import_module(name)
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    # What megatron takes the version for where there is none. It asks once, and keeps the answer.
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
