import pytest
from rewards import score


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("7", "7", 1.0),
        ("3 and 4 make 7", "7", 1.0),
        ("it costs 1,250", "1250", 1.0),
        ("7, or else 8", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_last_number_counts(response: str, answer: str, reward: float) -> None:
    assert score(response, answer) == reward
