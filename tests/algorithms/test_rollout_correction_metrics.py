"""The metrics of the mismatch on three tokens, by hand."""

import math

import pytest
import torch

from dagrl.algorithms.rollout_correction import mismatch_metrics
from dagrl.algorithms.rows import RowReducer
from dagrl.data.tally import read_tallies


def test_metrics_by_hand():
    # Probabilities for trainer and generator; the last token of the first response does not count.
    trainer = torch.tensor([0.5, 0.2, 1e-9, 0.2]).log()
    rollout = torch.tensor([0.25, 0.2, 1.0, 0.8]).log()
    rows = RowReducer(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 1, 0, 1]).bool())
    found = {
        name.removeprefix("mismatch/"): s
        for name, s in read_tallies([mismatch_metrics(trainer, rollout, rows)]).items()
    }
    log2 = math.log(2)
    # Ratios 2, 1 and 1/4; of the responses 2 and 1/4.
    assert {name: stat.mean for name, stat in found.items()} == pytest.approx(
        {
            "logprob_diff": log2,
            "prob_diff": (0.25 + 0.6) / 3,
            "kl": (-log2 + 0 + 2 * log2) / 3,
            "kl_k3": ((2 - 1 - log2) + 0 + (0.25 - 1 + 2 * log2)) / 3,
            "kl_reverse": ((2 * log2 - 1) + 0 + (-0.5 * log2 + 0.75)) / 3,
            "ratio": 3.25 / 3,
            "chi2_token": (3 + 0 - 15 / 16) / 3,
            "chi2_sequence": (3 - 15 / 16) / 2,
            "rollout_ppl": (math.sqrt(1 / 0.05) + 1.25) / 2,
            "trainer_ppl": (math.sqrt(1 / 0.1) + 5) / 2,
            "ppl_ratio": (math.sqrt(0.5) + 4) / 2,
            "unknown_fraction": 0,
        },
        rel=1e-6,
        abs=1e-7,
    )
    assert found["logprob_diff"].high == pytest.approx(2 * log2, rel=1e-6)
    assert found["prob_diff"].high == pytest.approx(0.6, rel=1e-6)
    assert found["ratio"].high == pytest.approx(2.0, rel=1e-6)
    assert (found["kl"].count, found["trainer_ppl"].count) == (3, 2)


def test_equal_logprobs_give_zero_and_one_exactly():
    logprob = torch.tensor([-0.3, -1.7, -12.0, -40.0])
    rows = RowReducer(torch.tensor([0, 0, 1, 1]), torch.ones(4).bool())
    found = read_tallies([mismatch_metrics(logprob, logprob, rows)])
    ones = {"mismatch/ratio", "mismatch/ppl_ratio"}
    perplexities = {"mismatch/rollout_ppl", "mismatch/trainer_ppl"}
    for name, stat in found.items():
        if name not in perplexities:
            assert stat.low == stat.high == (1.0 if name in ones else 0.0), name


def test_an_absurd_token_leaves_the_metrics_finite():
    rows = RowReducer(torch.tensor([0, 0]), torch.ones(2).bool())
    absurd, usual = torch.tensor([-1e4, -1.0]), torch.tensor([-1.0, -1.0])
    for trainer, rollout in ((absurd, usual), (usual, absurd)):
        found = read_tallies([mismatch_metrics(trainer, rollout, rows)])
        assert all(math.isfinite(stat.mean) for stat in found.values())
