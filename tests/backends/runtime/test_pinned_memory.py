"""Host memory that is pinned: by the driver where there is a GPU, by one that only takes notes where there is none."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dagrl.backends.runtime import pinned_memory
from dagrl.backends.runtime.device_memory import HostMemory
from dagrl.backends.runtime.pinned_memory import PinnedCopies, add_pinned, unpin

MIB = 2**20


class Driver:
    """Stands in for CUDA's runtime: keeps what is pinned, refuses more than `most` blocks."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815

    def __init__(self, most: int) -> None:
        self.most = most
        self.pinned: dict[int, int] = {}
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if len(self.pinned) == self.most:
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.waits, "copies may be under way"
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]


def driver(monkeypatch: pytest.MonkeyPatch, most: int) -> Driver:
    stand_in = Driver(most)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", stand_in.wait)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(synchronize=stand_in.wait))
    return stand_in


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that an address of this process lies in."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    for mapping in mappings:
        first, *lines = mapping.splitlines()
        start, end = (int(number, 16) for number in first.split()[0].split("-"))
        if start <= address < end:
            return dict(line.split(":", 1) for line in lines)
    raise AssertionError(f"nothing lies at {address:#x}")


def test_blocks_are_in_memory_and_pinned_until_they_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = driver(monkeypatch, most=9)
    blocks: list[torch.Tensor] = []
    add_pinned(blocks, 3, 4 * MIB)
    add_pinned(blocks, 1, 4 * MIB)
    assert stand_in.pinned == {block.data_ptr(): 4 * MIB for block in blocks}
    assert [(block.dtype, block.shape) for block in blocks] == [(torch.uint8, (4 * MIB,))] * 4
    mapping = mapping_of(blocks[0].data_ptr())
    # Adjacent blocks are one mapping to the kernel.
    size, resident = (int(mapping[name].split()[0]) for name in ("Size", "Rss"))
    assert size >= 4 * 1024
    assert resident == size, "some of it is not there yet: the driver would bring it page by page"
    assert "dc" in mapping["VmFlags"].split(), "a fork copies it"
    blocks[3].fill_(7)
    assert blocks[2].count_nonzero() == 0
    unpin(blocks)
    assert stand_in.pinned == {}


def test_a_failed_pin_keeps_the_pinned_part_and_reports_the_requested_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = driver(monkeypatch, most=2)
    blocks: list[torch.Tensor] = []
    wanted = r"cannot pin 0\.1 GiB of host memory .*: cudaHostRegister failed with 'out of memory'; check free"
    with pytest.raises(OSError, match=wanted):
        add_pinned(blocks, 16, 8 * MIB)
    assert sorted(stand_in.pinned) == sorted(block.data_ptr() for block in blocks)
    assert len(blocks) == 2


def test_missing_host_memory_is_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, most=1)
    with pytest.raises(OSError, match=r"cannot pin .* GiB of host memory .*Cannot allocate memory; check"):
        # More than there are addresses.
        add_pinned([], 1, 1 << 50)


def test_copies_have_values_of_their_own_in_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = driver(monkeypatch, most=9)
    monkeypatch.setattr(pinned_memory, "_COPY_BYTES", MIB)
    monkeypatch.setattr(pinned_memory, "_PIECE_BYTES", MIB)
    tensors = [
        torch.arange(7, dtype=torch.int64),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.full((3 * MIB // 2,), 3, dtype=torch.bfloat16),
        torch.full((MIB // 2,), 5, dtype=torch.float32),
        torch.ones(9, dtype=torch.bool),
    ]
    copies = PinnedCopies()
    taken = copies.take(tensors)
    assert list(stand_in.pinned.values()) == [3 * MIB] * 3
    assert stand_in.waits == 1 + 3 + 2 + 1, "before memory is taken, after each piece, at the end"
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, wanted in zip(taken, expected, strict=True):
        torch.testing.assert_close(copy, wanted, rtol=0, atol=0)
        # `torch.save` writes whole storages.
        assert copy.untyped_storage().nbytes() == copy.nbytes
    del copies
    assert stand_in.pinned == {}


def test_later_copies_are_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = driver(monkeypatch, most=9)
    monkeypatch.setattr(pinned_memory, "_COPY_BYTES", MIB)
    copies = PinnedCopies()
    copies.take([torch.ones(MIB // 4)] * 3)
    blocks = dict(stand_in.pinned)
    assert [each.sum().item() for each in copies.take([torch.full((MIB // 4,), 2.0)] * 2)] == [MIB / 2] * 2
    assert stand_in.pinned == blocks and len(blocks) == 3
    copies.take([torch.ones(MIB // 4)] * 4)
    assert stand_in.pinned.items() > blocks.items()
    # A larger tensor needs larger blocks.
    copies.take([torch.ones(MIB)])
    assert list(stand_in.pinned.values()) == [4 * MIB]


def test_copies_that_do_not_fit_leave_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = driver(monkeypatch, most=1)
    monkeypatch.setattr(pinned_memory, "_COPY_BYTES", MIB)
    with pytest.raises(OSError, match=r"cannot pin .* check free memory"):
        PinnedCopies().take([torch.ones(MIB // 4)] * 2)
    assert stand_in.pinned == {}


class OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True


def test_room_on_the_host_is_given_back_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = driver(monkeypatch, most=9)
    host = HostMemory(chunk_bytes=MIB)
    contents = [torch.ones(size, dtype=torch.uint8).as_subclass(OnGpu) for size in (MIB - 300, 200, MIB, 1)]
    assert sum(len(there) for _, there in host.pieces(contents)) == 2 * MIB - 99
    assert list(stand_in.pinned.values()) == [MIB] * 3
    assert sum(len(there) for _, there in host.pieces(contents)) == 2 * MIB - 99
    assert len(stand_in.pinned) == 3
    assert not stand_in.waits
    del host
    assert stand_in.pinned == {}


@pytest.mark.gpu
def test_host_memory_for_offloaded_state_is_pinned_while_in_use() -> None:
    tensor = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8, device="cuda")
    host = HostMemory(chunk_bytes=2 * MIB)
    host.put([tensor.untyped_storage()])
    chunks = list(host._chunks)
    assert len(chunks) == 2
    assert all(chunk.is_pinned() for chunk in chunks)
    wanted = tensor.cpu()
    tensor.zero_()
    host.take([tensor.untyped_storage()])
    assert torch.equal(tensor.cpu(), wanted)
    del host
    assert not any(chunk.is_pinned() for chunk in chunks)
