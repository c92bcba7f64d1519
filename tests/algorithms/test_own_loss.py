"""A loss of the user's own in the objective: what it is given, and what is said where it returns no loss."""

from __future__ import annotations

import math

import pytest
import torch

from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.own_loss import OwnLoss
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema import LossSpec
from dagrl.data.tally import read_tallies

READS = ("old_logprob", "advantage")


def tokens(**columns: list[float]) -> ResponseTokens:
    """Probabilities 1/2 and 1/4 of the first response, 1/8 of the third; the last token does not count."""
    return ResponseTokens(
        logprob=torch.tensor([0.5, 0.25, 0.125, 1e-30], dtype=torch.float64).log().requires_grad_(),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64),
        weight=torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=torch.float64),
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
        row=torch.tensor([0, 0, 2, 2]),
    )


def objective(function, *, reads=READS, per_response=(), args=None, available=READS) -> PolicyObjective:
    own = OwnLoss("mine:loss", function, args or {}, reads, per_response)
    return PolicyObjective(LossSpec(policy="mine:loss"), 1.0, available, own=own)


def test_ppo_written_by_a_user_is_ppo():
    def clipped(batch, low, high):
        ratio = torch.exp(batch["logprob"] - batch["old_logprob"])
        free, bounded = ratio * batch["advantage"], ratio.clamp(low, high) * batch["advantage"]
        return -torch.minimum(free, bounded), bounded < free

    old = [math.log(0.25), math.log(0.25), math.log(0.25), 900.0]
    given = {"old_logprob": old, "advantage": [1.0, 2.0, -1.0, 5.0]}
    ours, mine = tokens(**given), tokens(**given)
    expected, told = PolicyObjective(LossSpec(), 1.0, ("old_logprob",))(ours)
    loss, metrics = objective(clipped, args={"low": 0.8, "high": 1.2})(mine)
    expected.backward()
    loss.backward()
    assert loss.item() == expected.item()
    assert torch.equal(mine.logprob.grad, ours.logprob.grad)
    assert read_tallies([metrics]) == read_tallies([told])


def test_a_loss_sees_its_columns_responses_and_entropy():
    seen = {}

    def look(batch):
        seen.update({name: batch[name].tolist() for name in ("score", "weight", "entropy", "advantage", "old_logprob")})
        seen["means"] = batch.rows.means(batch["weight"]).tolist()
        seen["active"], seen["tokens"] = batch.rows.active.tolist(), len(batch)
        return -batch["logprob"] * batch["score"]

    given = tokens(advantage=[1.0, 1.0, 2.0, 9.0], score=[10.0, 20.0, 30.0], weight=[1.0, 3.0, 5.0, 7.0])
    reads = (*READS, "score", "weight")
    mine = objective(look, reads=reads, per_response=("score",), available=("advantage",))
    assert mine.columns == ("advantage", "score", "weight")
    loss, metrics = mine(given)
    loss.backward()
    assert seen["score"] == [10, 10, 30, 30]
    assert (seen["weight"], seen["means"]) == ([1, 3, 5, 7], [2, 2, 5, 5])
    assert (seen["entropy"], seen["active"], seen["tokens"]) == ([1, 2, 3, 4], [True, True, True, False], 4)
    # Nobody has written old log-probs: the current ones stand in.
    assert seen["old_logprob"] == given.logprob.tolist()
    assert given.logprob.grad.tolist() == [-2.5, -2.5, -15, 0]
    assert read_tallies([metrics])["ratio/clip_fraction"].mean == 0


def test_a_token_that_does_not_count_cannot_spoil_the_loss():
    given = tokens(advantage=[1.0, 1.0, 1.0, 1.0], old_logprob=[0.0, 0.0, 0.0, -900.0])
    # The user's own column of it is infinite.
    infinite = given.columns | {"weight": torch.tensor([1.0, 1.0, 1.0, math.inf], dtype=torch.float64)}
    given = ResponseTokens(given.logprob, given.entropy, given.weight, infinite, given.row)
    loss, _ = objective(lambda batch: -batch["logprob"] * batch["weight"], reads=(*READS, "weight"))(given)
    assert loss.item() == pytest.approx(-0.25 * math.log(0.5) - 0.25 * math.log(0.25) - 0.5 * math.log(0.125))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: 1.0, "returned 1.0; return a tensor with the loss of each token"),
        (lambda batch: None, "returned None; return a tensor"),
        (
            lambda batch: -batch["logprob"].mean(),
            r"returned a tensor \[\] for 4 tokens; return the loss of each token, neither summed nor averaged",
        ),
        (lambda batch: batch["logprob"].detach(), r"a loss without gradient; let it depend on tokens\['logprob'\]"),
        (lambda batch: (-batch["logprob"], 3), "returned no tensor of 4 bools as the clipped tokens"),
        (lambda batch: batch["value"], r"reads no 'value'; add it to the `reads`.*test_own_loss.py:\d+\)"),
        (lambda batch: 1 / 0, r"raised ZeroDivisionError: division by zero \(.*test_own_loss.py:\d+\)"),
    ],
)
def test_a_wrong_loss_is_refused_with_the_functions_name(function, message):
    given = tokens(advantage=[1.0] * 4, old_logprob=[0.0] * 4)
    with pytest.raises(ValueError, match=f"^mine:loss .*{message}"):
        objective(function)(given)
