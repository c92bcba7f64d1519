"""The controller of a divergence's weight, against numbers worked out by hand."""

import pytest

from dagrl.algorithms.reward_shaping import steered


@pytest.mark.parametrize(
    ("divergence", "samples", "expected"),
    [
        # Target 0.1, horizon 1000, weight 0.5. On target: as it is. 0.11 is 10 % above: 0.5 (1 + 0.1 * 0.2).
        (0.1, 200, 0.5),
        (0.11, 200, 0.51),
        (0.09, 200, 0.49),
        # Errors of 400 % and of -100 % count as 20 %.
        (0.5, 500, 0.55),
        (0.0, 500, 0.45),
        # k1 may say less than 0.
        (-0.3, 500, 0.45),
        # No step moves it by more than a fifth.
        (0.5, 9000, 0.6),
        (0.0, 9000, 0.4),
    ],
)
def test_the_weight_grows_where_there_is_too_much_and_shrinks_where_there_is_too_little(divergence, samples, expected):
    weight = steered(0.5, divergence=divergence, samples=samples, target=0.1, horizon=1000)
    assert weight == pytest.approx(expected, abs=1e-15)


def test_a_policy_that_answers_to_its_weight_ends_at_the_target():
    # A policy whose divergence is 0.02 / weight is at 0.1 with a weight of 0.2.
    weight = 1.0
    for _ in range(200):
        weight = steered(weight, divergence=0.02 / weight, samples=500, target=0.1, horizon=1000)
    assert weight == pytest.approx(0.2, abs=1e-6)
