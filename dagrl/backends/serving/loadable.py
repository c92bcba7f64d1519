"""Makes parameters that the server replaced after loading writable for the model's loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def substituted(parameters: Iterable[tuple[torch.nn.Module, str, torch.nn.Parameter]]) -> Iterator[None]:
    """Context in which modules have these parameters, by their names, instead of their own."""
    chosen = list(parameters)
    own = [(module, name, module._parameters[name]) for module, name, _ in chosen]
    try:
        for module, name, parameter in chosen:
            module._parameters[name] = parameter
        yield
    finally:
        for module, name, replaced in own:
            module._parameters[name] = replaced
