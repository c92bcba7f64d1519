"""The versions of SGLang that dagrl was tested with, and all that differs between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dagrl.backends.serving.client import ServerError
from dagrl.backends.tested import LibraryVersions

if TYPE_CHECKING:
    from types import ModuleType

    from sglang.srt.managers.tokenizer_manager import TokenizerManager

TESTED = LibraryVersions(
    title="SGLang",
    distributions=("sglang",),
    on_gpus=("0.5.17",),
    on_cpus=("0.5.17",),
    remedy="`make setup` installs 0.5.17",
)


class _NeverRaisedError(Exception):
    """Stands for an error that a version does not have."""


def aborted_error() -> type[Exception]:
    """What SGLang 0.5.17 raises for a request that is aborted before it is sent; 0.5.23 answers such a request."""
    from sglang.srt.managers import tokenizer_manager

    error: type[Exception] = getattr(tokenizer_manager, "RequestAbortedError", _NeverRaisedError)
    return error


@asynccontextmanager
async def weight_update(manager: TokenizerManager, *, changes_weights: bool) -> AsyncIterator[None]:
    """Context in which SGLang calls our loader: 0.5.23 wants each update between two requests.

    At these, all layers undo and redo their packing of weights; those of a draft model, of which there is none, if the
    loader does not change weights.
    """
    if not hasattr(manager, "begin_weight_update"):
        yield
        return
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    selector = "all" if changes_weights else "draft"
    _raise_unless(*await manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector)))
    try:
        yield
    finally:
        _raise_unless(*await manager.end_weight_update(EndWeightUpdateReqInput()))


def _raise_unless(success: bool, message: str) -> None:
    if not success:
        raise ServerError(f"SGLang could not load new weights: {message}")


def image_module() -> ModuleType:
    """The module whose ``embedding_cache`` has what a tower made of images; it is None in a process without a tower."""
    try:
        from sglang.srt.managers import mm_schedule as module
    except ImportError:
        from sglang.srt.managers import mm_utils as module
    return module
