"""Which rank saves a parameter's optimizer states. `test_checkpoint.py` saves and loads them in layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dagrl.backends.megatron.engine import optimizer_state


@given(st.integers(1, 8), st.integers(1, 50), st.data())
def test_the_ranks_pieces_make_up_a_parameter_and_the_first_one_saves_it(
    ranks: int, size: int, data: st.DataObject
) -> None:
    part: Any = SimpleNamespace(data_parallel_group=SimpleNamespace(size=lambda: ranks))
    bucket: Any = SimpleNamespace(grad_data=SimpleNamespace(numel=lambda: ranks * size))
    start = data.draw(st.integers(0, ranks * size - 1))
    place = range(start, data.draw(st.integers(start + 1, ranks * size)))
    pieces = [optimizer_state._piece_of(part, bucket, place, rank) for rank in range(ranks)]
    assert [element for piece in pieces if piece is not None for element in piece] == [*place]
    for rank, piece in enumerate(pieces):
        assert piece is None or set(piece) <= set(range(rank * size, (rank + 1) * size))
    assert optimizer_state._first(pieces) == place.start // size
