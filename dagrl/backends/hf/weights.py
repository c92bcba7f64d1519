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
    # Tied names are one object, filled under any name.
    filled: dict[int, str] = {}
    misshapen, untied = [], []
    for name, tensor in given.items():
        if (target := targets.get(name)) is None:
            continue
        if tensor.shape != target.shape:
            misshapen.append(f"{name} ({list(tensor.shape)}, not {list(target.shape)})")
        other = filled.setdefault(id(target), name)
        if other != name and not torch.equal(given[other], tensor):
            untied.append(f"{other} and {name}")
    missing = {id(target): name for name, target in reversed(targets.items()) if id(target) not in filled}
    faults = {
        "unknown": [name for name in given if name not in targets],
        "doubled": [name for name, times in names.items() if times > 1],
        "missing": [*reversed(missing.values())],
        "of the wrong shape": misshapen,
        "tied in this model but not equal": untied,
    }
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_first(wrong)}" for fault, wrong in faults.items() if wrong)
        raise ValueError(
            f"these weights do not fit the model, which keeps its own: {listed}. "
            "The sending and the receiving engine must have the same model."
        )
    with torch.no_grad():
        for name, tensor in given.items():
            targets[name].copy_(tensor)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"
