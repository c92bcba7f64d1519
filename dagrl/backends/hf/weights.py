"""Replaces all weights of a Hugging Face model, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from dagrl.model_files.library_model import published_tensors

_NAMES_SHOWN = 5


def replace_weights(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy `tensors`, by the names of published checkpoints, into the model, whose dtype and device stay.

    Tied tensors may be given under any of their names; under several they must be equal. ValueError for unknown,
    duplicate or missing names and wrong shapes; the model is then unchanged.
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
            "The sending and the receiving engine must have the same model."
        )
    with torch.no_grad():
        for name, tensor in given.items():
            targets[name].copy_(tensor)


def _missing(targets: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> list[str]:
    # Tied names are one object, filled under any name.
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
