"""Finds the descriptors of backends in this package and in other packages' entry points."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from dagrl.backends.backend import Backend
from dagrl.config.schema import EngineSpec
from dagrl.config.schema.backends import backend_packages, broken_backends


@cache
def backends() -> Mapping[str, Backend[Any]]:
    """Name -> descriptor, without backends that cannot be imported."""
    broken = broken_backends()
    return {name: _descriptor(package) for name, package in backend_packages().items() if name not in broken}


def backend_of[Spec: EngineSpec](engine: Spec) -> Backend[Spec]:
    return backends()[engine.backend]


def _descriptor(package: str) -> Backend[Any]:
    descriptor = getattr(import_module(f"{package}.descriptor"), "BACKEND", None)
    if not isinstance(descriptor, Backend):
        raise ImportError(f"{package}.descriptor has no BACKEND that is a dagrl.backends.backend.Backend")
    return descriptor
