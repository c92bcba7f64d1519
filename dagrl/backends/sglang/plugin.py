"""Patches SGLang to run on CPUs without its kernels. An entry point that SGLang loads in each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def prepare_cpu() -> None:
    """Without a GPU, avoid a missing rotary kernel, pinned host memory, and padding for kernels of other builds."""
    import torch

    if torch.cuda.is_available():
        return
    # First, as modules of SGLang take names from torch.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010 (its type differs)
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))
    from sglang.srt.configs import update_config
    from sglang.srt.layers.rotary_embedding import base as rotary_embedding

    rotary_embedding._is_cpu = True
    # It would pad MLPs and experts for its own build's kernels, with uninitialised memory for experts.
    update_config.update_intermediate_size = lambda model_config, *_: model_config


def _pageable[**P](constructor: Callable[P, Tensor]) -> Callable[P, Tensor]:
    def construct(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        kwargs.pop("pin_memory", None)
        return constructor(*args, **kwargs)

    return construct
