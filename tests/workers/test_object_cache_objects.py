"""What is said of objects that do not come."""

from __future__ import annotations

import pytest
import ray
from ray import exceptions

from dagrl.workers.object_cache import ObjectTimeoutError, get_objects


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (exceptions.GetTimeoutError(), "waited 5 s for 2 blocks, out of Ray's object store"),
        (exceptions.ActorDiedError(), "the process that was asked for 2 blocks has died"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_timeout_is_described_in_one_sentence(monkeypatch, failure, told) -> None:
    def get(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ObjectTimeoutError) as caught:
        get_objects([object(), object()], 5.0, "2 blocks")
    assert str(caught.value) == told
