"""Which metrics are those of policies and rewards beside the first."""

import pytest

from dagrl.tracking.console import same_of_others

METRICS = [
    "reward/mean",
    "reward/std",
    "reward/overlong",
    "reward/verdict",
    "val/reward/mean",
    "val/reward/verdict",
    "val/loss/sft",
    "loss/policy",
    "update_verifier/loss/policy",
    "filter/reward/mean",
    "val/verify/response_tokens/mean",
    "verify/response_tokens/mean",
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("reward/mean", [("reward/verdict", "verdict")]),
        ("val/reward/mean", [("val/reward/verdict", "verdict")]),
        ("loss/policy", [("update_verifier/loss/policy", "update_verifier")]),
        ("loss/sft", []),
        ("response_tokens/mean", [("verify/response_tokens/mean", "verify")]),
    ],
)
def test_the_same_of_others_is_found_by_name(name, found):
    assert same_of_others(name, METRICS) == found
