"""A replay copies what was noted, however it lies in the bucket."""

import pytest
import torch

from dagrl.weight_sync.copies import Replay, TracedCopy


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (2, 3), (3, 2), (2, 1), (2, 2), (8, 4)])
@pytest.mark.parametrize("lies", ["side by side", "with gaps", "turned", "stretched"])
def test_it_copies_any_view_of_a_bucket(rows, columns, lies):
    buffer = torch.arange(256, dtype=torch.uint8)
    numbers, stride = buffer.view(torch.int32), {"with gaps": (7, 1), "turned": (1, rows), "stretched": (0, 1)}
    source = numbers.as_strided((rows, columns), stride.get(lies, (columns, 1)), 2)
    target = torch.zeros(rows, columns, dtype=torch.int32)
    Replay([TracedCopy(target, source.dtype, 2, tuple(source.shape), source.stride())]).run(buffer)
    assert target.tolist() == source.tolist()
