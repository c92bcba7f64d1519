"""Keys that several runs of tokens read: their gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.backends.megatron.engine.prefix_sharing import Readers, _GatheredTokens

CPU = torch.device("cpu")


def gradients(keys: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of gathered tokens, and that of torch's own selection."""
    index = np.array(keys, dtype=np.int64)
    generator = torch.Generator().manual_seed(len(keys))
    values = torch.randn(tokens, 2, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    slopes = torch.randn(len(keys), 2, 3, dtype=torch.float64, generator=generator)
    places = torch.from_numpy(index)
    gathered = _GatheredTokens.apply(values, places, Readers.of(index, tokens, CPU))
    assert torch.equal(gathered, values[places])
    (own,) = torch.autograd.grad(gathered, values, slopes)
    (expected,) = torch.autograd.grad(values[places], values, slopes)
    return own, expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=40))
def test_the_gradient_of_a_token_is_the_sum_over_its_copies(keys: list[int]) -> None:
    own, expected = gradients(keys, 12)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", [[0, 1, 2, 3], [3, 1, 0, 2], [0, 0, 0, 0], [3]])
def test_one_copy_of_each_token_and_all_copies_of_one(keys: list[int]) -> None:
    own, expected = gradients(keys, 4)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
