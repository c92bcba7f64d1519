from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagrl.config.share import Share
from dagrl.data.order.passes import Adaptive, AdaptiveRules, Passes, in_order, shuffled, sorted_by


@given(
    rows=st.integers(1, 60),
    of=st.integers(1, 5),
    batch=st.integers(1, 9),
    kind=st.sampled_from(["shuffled", "file", "adaptive"]),
    data=st.data(),
)
def test_together_explorers_take_each_row_once_in_an_epoch(rows, of, batch, kind, data):
    of = min(of, rows)
    unusable = data.draw(st.sets(st.integers(0, rows - 1), max_size=rows // 3))
    window = in_order(rows) if kind == "file" else shuffled([rows], (5,))
    taken: list[int] = []
    for number in range(1, of + 1):
        share = Share(number, of)
        mine = [row for row in range(rows) if row % of == number - 1 and row not in unusable]
        if not mine:
            continue
        if kind == "adaptive":
            order = Adaptive(rows, window, AdaptiveRules(0.2, 0.8, 2, "pass_rate", 0.1), (5,), share)
        else:
            order = Passes(rows, window, share)
        own: list[int] = []
        for step in count(1):
            own += order.take(min(batch, len(mine) - len(own)), unusable, step)
            if len(own) == len(mine):
                break
        # An adaptive order may draw a row again before it has drawn all.
        assert set(own) <= set(mine) if kind == "adaptive" else sorted(own) == mine
        taken += own
    assert kind == "adaptive" or sorted(taken) == [row for row in range(rows) if row not in unusable]


def test_a_share_is_that_of_the_epochs_order():
    window = sorted_by(np.array([3, 1, 2, 0]), descending=False)
    assert Passes(4, window, Share(1, 2)).take(4, (), 1) == [2, 0, 2, 0]
    assert Passes(4, window, Share(2, 2)).take(4, (), 1) == [3, 1, 3, 1]


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/", "a/b", "1/2/3", "-1/2", "1 / 2", "", "0/0"])
def test_an_explorer_has_a_number_of_how_many(text):
    with pytest.raises(ValueError, match="such as 2/3"):
        Share.parse(text)
    assert str(Share.parse("2/3")) == "2of3" and [Share(each, 3).rows(7) for each in (1, 2, 3)] == [3, 2, 2]
