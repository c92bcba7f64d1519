"""Contents that leave a device and come back; that engines are the same afterwards is tested with the engines."""

from __future__ import annotations

import pytest
import torch

from dagrl.backends.runtime.device_memory import HostMemory, OffloadableStorages, storages_of


def test_contents_come_back_over_the_borders_of_chunks_and_room_is_used_again() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in (700, 1, 0, 1024, 3)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    wanted = [tensor.clone() for tensor in tensors]
    host = HostMemory(chunk_bytes=512)
    for _ in range(3):
        host.put(storages)
        for tensor in tensors:
            tensor.zero_()
        host.take(storages)
        assert all(torch.equal(tensor, content) for tensor, content in zip(tensors, wanted, strict=True))
        # 700 bytes fill up to 768, then 1 to 256, 1024, and 3.
        assert host.nbytes == 5 * 512


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_contents_change_places_with_what_was_put_and_back(device: str) -> None:
    generator = torch.Generator().manual_seed(4)
    first, second = (
        [
            torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            for size in (700, 1, 0, 1 << 20, 3, 5 << 19)
        ]
        for _ in range(2)
    )
    host = HostMemory(chunk_bytes=1 << 19)
    there = [content.to(device) for content in first]
    host.put([tensor.untyped_storage() for tensor in there])
    for tensor, content in zip(there, second, strict=True):
        tensor.copy_(content)
    for wanted in (first, second, first):
        host.swap(there)
        assert all(torch.equal(tensor.cpu(), content) for tensor, content in zip(there, wanted, strict=True))


def test_views_see_a_part_that_was_away_and_users_may_nest() -> None:
    whole = torch.arange(8.0)
    view = whole[2:4]
    part = OffloadableStorages(lambda: {0: whole.untyped_storage()}, keep=True, rests_away=True)
    assert whole.untyped_storage().nbytes() == 0
    with part.in_use():
        with part.in_use():
            view.add_(1)
        assert whole.tolist() == [0, 1, 3, 4, 4, 5, 6, 7]
    assert whole.untyped_storage().nbytes() == 0
    with part.in_use():
        assert view.tolist() == [3, 4]


def test_memory_that_is_not_kept_comes_back_as_zeros() -> None:
    tensor = torch.ones(3)
    part = OffloadableStorages(lambda: {0: tensor.untyped_storage()}, keep=False, rests_away=False)
    part.sleep()
    assert tensor.untyped_storage().nbytes() == 0
    part.wake()
    assert tensor.tolist() == [0, 0, 0]


def test_a_storage_that_several_tensors_look_into_is_one() -> None:
    whole, other = torch.arange(8.0), torch.ones(2)
    storages = storages_of([whole[2:], other, whole, whole.view(2, 4)])
    assert [storage.nbytes() for storage in storages.values()] == [32, 8]


def test_a_part_that_rests_away_stays_away_when_its_owner_wakes() -> None:
    tensor = torch.arange(3.0)
    part = OffloadableStorages(lambda: storages_of([tensor]), keep=True, rests_away=True)
    part.sleep()
    part.wake()
    assert tensor.untyped_storage().nbytes() == 0
    with part.in_use():
        assert tensor.tolist() == [0, 1, 2]
