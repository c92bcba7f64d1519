"""PPO's clipped loss, at and around the edges of its clips. Probabilities are chosen so that ratios are exact."""

import pytest
import torch

from dagrl.algorithms.losses import ppo_clip


def clip_one(ratio: float, advantage: float, *, high: float = 0.2, dual: float | None = None):
    """Loss of one token, its gradient in the log-prob, and whether it counts as clipped; lower clip 0.2."""
    logprob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    result = ppo_clip(logprob, torch.zeros_like(logprob), advantages, clip_low=0.2, clip_high=high, dual_clip=dual)
    result.loss.sum().backward()
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-15)
    return result.loss.item(), logprob.grad.item(), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # Within the clip: loss -r A, gradient -r A.
        (1.1, 2.0, -2.2, -2.2, False),
        (0.9, -2.0, 1.8, 1.8, False),
        # Gone far enough in the direction of the advantage: loss -(1 +- 0.2) A, no gradient.
        (1.5, 2.0, -2.4, 0.0, True),
        (0.5, -2.0, 1.6, 0.0, True),
        # Gone the wrong way: the clip must not stop the way back.
        (0.5, 2.0, -1.0, -1.0, False),
        (1.5, -2.0, 3.0, 3.0, False),
        # Nothing to gain.
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_each_side_of_the_clip(ratio, advantage, loss, gradient, clipped):
    assert clip_one(ratio, advantage) == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient", "clipped"),
    [(1.25, -1.25, -1.25, False), (1.35, -1.3, 0.0, True)],
)
def test_the_upper_clip_may_be_higher(ratio, loss, gradient, clipped):
    result = clip_one(ratio, 1.0, high=0.3)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


def test_the_upper_clip_leaves_the_lower_alone():
    assert clip_one(0.75, -1.0, high=0.3) == (pytest.approx(0.8, abs=1e-14), 0.0, True)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # Negative advantage, dual clip 3: the loss r * 2 stops at 3 * 2.
        (2.5, -2.0, 5.0, 5.0, False),
        (4.0, -2.0, 6.0, 0.0, True),
        # The lower clip still holds.
        (0.5, -2.0, 1.6, 0.0, True),
        # Positive advantages know no dual clip.
        (4.0, 2.0, -2.4, 0.0, True),
        (0.9, 2.0, -1.8, -1.8, False),
    ],
)
def test_the_dual_clip_bounds_negative_advantages(ratio, advantage, loss, gradient, clipped):
    result = clip_one(ratio, advantage, dual=3.0)
    assert result == (pytest.approx(loss, abs=1e-14), pytest.approx(gradient, abs=1e-14), clipped)


@pytest.mark.parametrize("edge", [0.75, 1.25])
def test_at_the_very_edge_the_gradient_is_whole(edge):
    # 0.75 and 1.25 are exact in binary, and so is their log's exp here: the clip is met, not crossed.
    logprob = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([edge, edge], dtype=torch.float64).log()
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    exact = torch.equal(torch.exp(-old), torch.tensor([edge, edge], dtype=torch.float64))
    assert exact, "the test needs a ratio that is exactly on the edge"
    result = ppo_clip(logprob, old, advantage, clip_low=0.25, clip_high=0.25)
    result.loss.sum().backward()
    assert not result.clipped.any()
    assert logprob.grad.tolist() == [-edge, edge]
