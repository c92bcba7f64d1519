"""Digests of weights."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dagrl.weight_sync.digest import weight_digests


@given(st.integers(1, 67), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_one_bit_changes_the_digest(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(size, dtype=torch.float32).to(dtype)
    changed = tensor.clone()
    place = data.draw(st.integers(0, size * dtype.itemsize - 1))
    changed.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(changed) != digest(tensor)
    assert digest(tensor.clone()) == digest(tensor)


@given(st.permutations(range(9)))
def test_the_order_of_values_counts(order: list[int]) -> None:
    tensor = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (digest(tensor[order]) == digest(tensor)) is (order == sorted(order))


def test_memory_layout_does_not_count_and_the_norm_is_euclid_s() -> None:
    tensor = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    (digest_, norm), (of_transposed, _) = (
        weight_digests([[("w", each)]])["w"] for each in (tensor, tensor.t().contiguous().t())
    )
    assert digest_ == of_transposed and norm == 5.0
    part = torch.arange(10, dtype=torch.float32)[3:]
    assert digest(part) == digest(torch.from_numpy(np.arange(3, 10, dtype=np.float32)))


def digest(tensor: torch.Tensor) -> str:
    return weight_digests([[("w", tensor)]])["w"][0]
