"""What it takes to pin the host's memory, as dagrl does it and as the driver does: beside engines, and alone."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dagrl.backends.runtime import device_memory
from dagrl.backends.runtime.device_memory import HostMemory

ALONE_GIB = 4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def first_sleeps(engine: Any, logprobs: Callable[[], Any]) -> dict[str, Any]:
    """First sleeps of a Megatron engine that has been updated: with host memory to pin, several times over.

    The first of all does besides what a process does once; after the last, `again`, there is nothing to pin.
    """
    wanted = logprobs()
    parts = [engine._memory._weights, engine._memory._training[1]]
    # Kept, so that each way gets memory that nobody has had yet: it takes longer to come.
    had: list[HostMemory] = []
    found: dict[str, Any] = {"same_to_the_bit": True}
    for way in ("first", "driver", "dagrl", "again"):
        with ExitStack() as as_the_driver_does:
            if way in ("driver", "dagrl"):
                had += [part._host for part in parts]
                for part in parts:
                    part._host = HostMemory()
            if way == "driver":
                as_the_driver_does.enter_context(_driver_pins())
            found[f"{way}_sleep_s"] = _seconds(engine.sleep)
            found[f"{way}_wake_s"] = _seconds(engine.wake)
        found["same_to_the_bit"] &= bool((wanted == logprobs()).all())
    # Beside the copies and whatever else each sleep does.
    gib = sum(part._host.nbytes for part in parts) / 2**30
    for way in ("driver", "dagrl"):
        pinning = max(found[f"{way}_sleep_s"] - found["again_sleep_s"], 1e-3)
        found |= {f"{way}_pins_gib_s": gib / pinning, f"{way}_wakes_gib_s": gib / found[f"{way}_wake_s"]}
    return found | {"pinned_gib": gib}


def pinning_alone() -> dict[str, Any]:
    """GiB/s of pinning `ALONE_GIB`, mostly of memory that somebody has had before, and of giving it back."""
    found: dict[str, Any] = {"huge_pages": HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "none"}
    # What torch has pinned it keeps to use again.
    torch._C._host_emptyCache()
    with _driver_pins():
        found["driver_64_mib_gib_s"], _ = _gib_per_second(64)
    torch._C._host_emptyCache()
    for mib in (64, 256, 1024):
        found[f"dagrl_{mib}_mib_gib_s"], found[f"unpin_{mib}_mib_gib_s"] = _gib_per_second(mib)
    with mock.patch.object(mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE):
        found["dagrl_small_pages_gib_s"], found["unpin_small_pages_gib_s"] = _gib_per_second(64)
    return found


def _gib_per_second(mib: int) -> tuple[float, float]:
    blocks: list[torch.Tensor] = []
    pinning = _seconds(lambda: device_memory.add_pinned(blocks, ALONE_GIB * 1024 // mib, mib << 20))
    assert all(block.is_pinned() for block in blocks)

    def give_back() -> None:
        device_memory.unpin(blocks)
        blocks.clear()

    return ALONE_GIB / pinning, ALONE_GIB / max(_seconds(give_back), 1e-3)


@contextmanager
def _driver_pins() -> Iterator[None]:
    """Within the context host memory is pinned by torch, one block after the other."""

    def add(blocks: list[torch.Tensor], count: int, nbytes: int) -> None:
        blocks += [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]

    with mock.patch.multiple(device_memory, add_pinned=add, unpin=lambda blocks: None):
        yield


def _seconds(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.monotonic()
    act()
    torch.cuda.synchronize()
    return time.monotonic() - began
