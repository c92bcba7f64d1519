"""The tested versions of SGLang, and the known differences of 0.5.23, which is not one of them."""

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
    """Placeholder for an exception class that the installed version lacks."""


def aborted_error() -> type[Exception]:
    """Return the exception for a request that is aborted before it is sent.

    SGLang 0.5.17 raises it. 0.5.23 returns an aborted response instead.
    """
    from sglang.srt.managers import tokenizer_manager

    error: type[Exception] = getattr(tokenizer_manager, "RequestAbortedError", _NeverRaisedError)
    return error


@asynccontextmanager
async def weight_update(manager: TokenizerManager, *, changes_weights: bool) -> AsyncIterator[None]:
    """Context in which SGLang calls dagrl's loader. Raises ServerError if SGLang does not begin or end an update.

    0.5.23 requires a request before and after each update, at which the layers of the selected model unpack and pack
    their weights. An update without new weights selects the draft model, which does not exist.
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
    """The module of ``embedding_cache``, which keeps embeddings of images; it is None in a process without a tower."""
    try:
        from sglang.srt.managers import mm_schedule as module
    except ImportError:
        from sglang.srt.managers import mm_utils as module
    return module
