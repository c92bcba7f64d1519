"""Replacing all weights of a Hugging Face model at once, or none: used by `dagrl.backends.hf.engine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from dagrl.backends.model_source import published_tensors

_NAMES_SHOWN = 5


def replace_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy `tensors`, by the names of published checkpoints, into the model's, which keep their dtype and device.

    Tensors that the model ties together need to be given under one of their names only; under several they must be
    equal. ValueError where a name is unknown, doubled or missing, or a shape is not the model's; then, as when
    `tensors` itself raises, the model is unchanged. So all of them are held until the last has come.
    """
    names: Counter[str] = Counter()
    given: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        names[name] += 1
        given[name] = tensor
    targets = published_tensors(model)
    faults = [
        *_listed("unknown", [name for name in given if name not in targets]),
        *_listed("doubled", [name for name, times in names.items() if times > 1]),
        *_listed("missing", _missing(targets, given)),
        *_listed("of the wrong shape", _misshapen(targets, given)),
        *_listed("tied in this model but not equal", _untied(targets, given)),
    ]
    if faults:
        raise ValueError(
            f"these weights do not fit the model, which keeps its own: {'; '.join(faults)}. "
            "The engine that sends them and the one that takes them must hold the same model."
        )
    with torch.no_grad():
        for name, tensor in given.items():
            targets[name].copy_(tensor)


def _missing(targets: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    # Tied names are one object; any of them fills it.
    filled = {id(targets[name]) for name in given if name in targets}
    missing: dict[int, str] = {}
    for name, target in targets.items():
        if id(target) not in filled:
            missing.setdefault(id(target), name)
    return list(missing.values())


def _misshapen(targets: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{name} ({list(tensor.shape)}, not {list(targets[name].shape)})"
        for name, tensor in given.items()
        if name in targets and tensor.shape != targets[name].shape
    ]


def _untied(targets: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    first: dict[int, str] = {}
    untied = []
    for name in given:
        if name in targets:
            other = first.setdefault(id(targets[name]), name)
            if other != name and not torch.equal(given[other], given[name]):
                untied.append(f"{other} and {name}")
    return untied


def _listed(fault: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return [f"{fault}: {', '.join(names[:_NAMES_SHOWN])}{more}"]
