"""An estimator of the user's own: what it is given, and what is said where it returns no advantages."""

from __future__ import annotations

import re

import pytest

from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput

HEADER = "import numpy as np\n\nimport dagrl\n\n"


@pytest.fixture
def part(bench) -> OpInput:
    """Two groups of two, with responses of one and two tokens; the last token does not count."""
    batch = bench.batch(
        [4, 5, 6, 7],
        group_id=[2, 2, 3, 3],
        reward=[1, 0, 5, 5],
        response_mask=[[1], [1, 1], [1, 1], [0]],
        old_logprob=[[-1], [-1, -2], [-3, -1], [-2]],
        ref_logprob=[[-2], [-2, -3], [-3, -1], [-1]],
    )
    return OpInput(1, batch)


@pytest.fixture
def estimate(bench, part, request):
    """Run a function with this body as the estimator of a node."""
    module = f"estimators_of_{abs(hash(request.node.name))}"

    def run(body: str, *, reads: str = "", parameters: str = "", **options):
        source = f"{HEADER}@dagrl.estimator({reads})\ndef mine(batch{parameters}):\n    {body}\n"
        bench.write_module(module, source)
        node = {"op": "advantage", "estimator": f"{module}:mine", **options}
        (output,) = advantage([part], bench.context("advantage", nodes={"advantage": node}))
        return output

    return run


def test_a_number_per_response_is_repeated_for_its_tokens(estimate) -> None:
    output = estimate(
        "return batch['reward'] - batch['group_id'] * scale", parameters=", *, scale", args={"scale": 0.5}
    )
    assert output.columns["advantage"].values.tolist() == [0, -1, -1, 3.5, 3.5, 0]
    assert output.columns["advantage"].lengths.tolist() == [1, 2, 2, 1]
    assert output.columns["advantage"].values.dtype == "float32"


def test_an_array_for_each_response_is_one_number_for_each_token(estimate) -> None:
    body = "return [-old * row for old, row in zip(batch['old_logprob'], batch['reward'])]"
    output = estimate(body, reads="reads=['old_logprob'], scope='row'")
    assert output.columns["advantage"].values.tolist() == [1, 0, 0, 15, 5, 0]


def test_the_reward_comes_with_penalties_taken_off(estimate) -> None:
    # By k1 the responses diverge by 1, 2, 0 and, outside the mask, not at all. Of length 2 of 3, buffer 2: half of 0.4.
    options = {"kl_in_reward": {"coef": 0.1}, "overlong_buffer": {"len": 2, "penalty_factor": 0.4}}
    output = estimate("return batch['reward']", **options)
    assert output.columns["advantage"].values.tolist() == pytest.approx([0.9, -0.4, -0.4, 4.8, 4.8, 0])


def test_it_sees_what_it_reads_and_the_mask(estimate) -> None:
    estimate("assert sorted(batch) == ['group_id', 'response_mask', 'reward']; return batch['reward']")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", "returned None as advantages; return a number for each response"),
        ("[1, 2, 3]", "returned 3 advantages for 4 responses"),
        ("__import__('itertools').repeat(1.0)", "returned too many advantages for 4 responses"),
        (
            "[type('F', (float,), {'__eq__': lambda *_: True})('nan')] * 4",
            "advantage of nan",
        ),
        ("exec('raise KeyboardInterrupt')", "raised KeyboardInterrupt"),
        ("[1, [1, 2, 3], 1, 1]", r"an advantage of shape \[3\] for a response of 2 tokens"),
        ("['a', 1, 1, 1]", "as advantages; return a number for each response"),
        ("[1, 10**400, 1, 1]", "as advantages; return a number for each response"),
        ("[1, float('nan'), 1, 1]", "returned an advantage of nan; advantages must be finite numbers"),
        ("[1, -1e39, 1, 1]", "returned an advantage of -inf; advantages must be finite numbers"),
        ("batch['value']", r"raised KeyError: 'value' \(.*estimators_of_\d+\.py:7\)"),
    ],
)
def test_wrong_advantages_are_refused_with_the_functions_name(estimate, returned: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^estimators_of_\d+:mine .*{message}") as caught:
        estimate(f"return {returned}")
    assert re.search(r"estimators_of_\d+\.py:\d+\)", str(caught.value))


def test_masked_tokens_may_have_any_advantage(estimate) -> None:
    output = estimate("return [1, 1, 1, float('inf')]")
    assert output.columns["advantage"].values.tolist() == [1, 1, 1, 1, 1, 0]
