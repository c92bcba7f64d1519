"""Durations of a run."""

from __future__ import annotations

import pytest

from dagrl.config.schema.run import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("3h30m", 12600),
        ("1d12h", 129600),
        ("90m", 5400),
        ("45s", 45),
        ("0.5h", 1800),
        ("1d1h1m1s", 90061),
    ],
)
def test_durations_are_numbers_with_units(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "4", "4 h", "h", "0h", "0h0m", "-1h", "4H", "4:00", "1w", "4h\n", "٤h", "1e3h", "."]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration; write 4h"):
        seconds_of(text)
