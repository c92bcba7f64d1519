"""The policy objective: numbers by hand, and the same loss however the batch is cut."""

import itertools
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.algorithms.objective import PolicyObjective
from dagrl.backends.base import ResponseTokens
from dagrl.config.schema import Aggregation, LossSpec, RolloutCorrectionSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.tally import read_tallies

VOCAB = 5
ALL = ("advantage", "old_logprob", "ref_logprob")


def packed(batch: Batch, objective: PolicyObjective, logits: torch.Tensor, totals: tuple[float, ...]) -> ResponseTokens:
    """What an engine makes of a micro-batch: `logits` [all tokens, vocab] are the model, tokens index them."""
    index = torch.from_numpy(batch["position"].values)
    distribution = logits[index].log_softmax(-1)
    tokens = torch.from_numpy(batch["response_tokens"].values)
    return ResponseTokens(
        logprob=distribution.gather(-1, tokens[:, None])[:, 0],
        entropy=-(distribution.exp() * distribution).sum(-1) if objective.needs_entropy else None,
        weight=torch.from_numpy(objective.token_weights(batch)[0].values).double() / (totals[0] or 1.0),
        columns={name: torch.from_numpy(batch[name].values).double() for name in objective.columns},
        row=torch.from_numpy(np.repeat(np.arange(len(batch)), batch["response_tokens"].lengths)),
        totals=totals,
    )


def train(parts: list[Batch], objective: PolicyObjective, logits: torch.Tensor):
    """Loss, gradient and metrics of a batch that comes in `parts`, as an engine accumulates them."""
    logits = logits.clone().requires_grad_()
    totals = tuple(np.sum([objective.token_weights(part)[1] for part in parts], axis=0))
    total, tallies = 0.0, []
    for part in parts:
        loss, told = objective(packed(part, objective, logits, totals))
        loss.backward()
        total += loss.item()
        assert not any(each.requires_grad for each in told.values())
        tallies.append(told)
    stats = read_tallies(tallies)
    largest = {f"largest {name}": stat.high for name, stat in stats.items() if name.startswith(("mismatch", "correct"))}
    return total, logits.grad, {name: stat.mean for name, stat in stats.items()} | largest


def make_batch(mask: list[list[int]], seed: int) -> tuple[Batch, torch.Tensor]:
    """Responses with random tokens, advantages and log-probs, and the logits of the policy for them."""
    random = np.random.default_rng(seed)
    count = sum(len(row) for row in mask)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in mask])])
    values = {
        "response_tokens": random.integers(0, VOCAB, count),
        "response_mask": np.array([value for row in mask for value in row], dtype=np.float32),
        "advantage": random.normal(size=count),
        "old_logprob": -random.exponential(1.6, count),
        "ref_logprob": -random.exponential(1.6, count),
        "position": np.arange(count),
    }
    values["rollout_logprob"] = values["old_logprob"] + random.normal(scale=0.7, size=count)
    values["clip_cov_mask"] = random.integers(0, 2, count)
    columns = {name: Column(array, offsets) for name, array in values.items()}
    return Batch(np.arange(len(mask)), columns), torch.from_numpy(random.normal(size=(count, VOCAB)))


@st.composite
def cut_batches(draw):
    """A batch, its logits, and the same rows in any order and number of parts; some may be empty."""
    mask = draw(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=7))
    if not any(map(any, mask)):
        mask.append([1])
    batch, logits = make_batch(mask, draw(st.integers(0, 1000)))
    order = np.array(draw(st.permutations(range(len(mask)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(mask)), max_size=4)))
    return batch, logits, [batch.take(part) for part in np.split(order, cuts)]


def test_the_entropy_of_each_source_is_that_of_its_active_tokens() -> None:
    batch, logits = make_batch([[1, 0, 1], [1, 1], [0], [1]], seed=3)
    batch = batch.with_columns({"source": Column(np.array([1, 0, 1, -1]))})
    objective = PolicyObjective(LossSpec(), 1.0, ALL, sources=("train/a/", "train/b/", "train/none/"))
    _, _, metrics = train([batch.take(np.array([0, 3])), batch.take(np.array([1, 2]))], objective, logits)
    distribution = logits.log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1).numpy()
    assert metrics["train/a/entropy"] == pytest.approx(entropy[[3, 4]].mean())
    assert metrics["train/b/entropy"] == pytest.approx(entropy[[0, 2]].mean())
    assert metrics["entropy"] == pytest.approx(entropy[[0, 2, 3, 4, 6]].mean())
    assert math.isnan(metrics["train/none/entropy"])


POLICIES: list[dict[str, Any]] = [
    {"policy": "ppo_clip"},
    {"policy": "ppo_clip", "dual_clip": 2.0},
    {"policy": "gspo"},
    {"policy": "gmpo"},
    {"policy": "sapo"},
    {"policy": "topr"},
    {"policy": "cispo"},
    {"policy": "cpgd", "drift_coef": 0.1},
    {"policy": "reinforce"},
    {"policy": "opmd", "tau": 0.0},
    {"policy": "opmd_kimi", "tau": 0.5},
    {"policy": "dppo_tv", "clip_ratio": 0.1},
    {"policy": "dppo_kl", "clip_ratio": 0.05, "ratio_cap": 3.0},
    {"policy": "vespo"},
    {"policy": "fipo", "half_life": 2.0, "dual_clip": 2.0, "future_low": 0.5},
    {"policy": "dro", "tau": 0.5},
    {"policy": "ppo_clip", "off_policy_delta": 0.1},
]
MARKED: list[dict[str, Any]] = [{"policy": "clip_cov"}, {"policy": "kl_cov"}, {"policy": "m2po"}]
"""Losses that read marks of tokens."""
OF_RESPONSES = ("gspo", "gmpo", "topr", "opmd_kimi", "vespo", "fipo")

CORRECTIONS = [
    None,
    {"rollout_is": "token"},
    {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_is_threshold_lower": 0.5},
    {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token", "rollout_rs_threshold": 2.5},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": True, "rollout_token_veto_threshold": 0.3},
    {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.4},
    {"rollout_rs": "geometric", "rollout_rs_threshold": 1.4},
    {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.2},
    {"rollout_rs": "token_binary_kl", "rollout_rs_threshold": 0.05},
    {"rollout_rs": "seq_mean_tv", "rollout_rs_threshold": 0.1},
]


@settings(deadline=None)
@given(
    cut_batches(),
    st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    st.sampled_from(["k1", "k2", "k3", "k3*"]),
    st.sampled_from([*POLICIES, *MARKED]),
    st.sampled_from(CORRECTIONS),
)
def test_micro_batches_do_not_change_loss_gradient_or_metrics(cut, aggregation, estimator, policy, correction):
    batch, logits, parts = cut
    spec = LossSpec(aggregation=aggregation, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1, **policy)
    corrections = {"correction": RolloutCorrectionSpec(**correction)} if correction else {}
    objective = PolicyObjective(spec, 1.0, (*ALL, "rollout_logprob"), longest_response=5, **corrections)
    loss, gradient, metrics = train([batch], objective, logits)
    loss_in_parts, gradient_in_parts, metrics_in_parts = train(parts, objective, logits)
    assert loss_in_parts == pytest.approx(loss, abs=1e-10)
    torch.testing.assert_close(gradient_in_parts, gradient, atol=1e-10, rtol=0)
    assert metrics_in_parts == pytest.approx(metrics, abs=1e-10)
    assert correction or gradient.abs().max() > 0


@settings(deadline=None)
@given(
    cut_batches(),
    st.sampled_from(get_args(Aggregation)),
    st.sampled_from(POLICIES),
    st.sampled_from(CORRECTIONS),
    st.booleans(),
)
def test_the_metric_is_the_number_whose_gradient_is_applied(cut, aggregation, policy, correction, in_rows):
    batch, logits, parts = cut
    available = [*ALL, "rollout_logprob"]
    if in_rows:
        # Each trajectory has two of the rows, or is cut off.
        share = Column(np.full(len(batch), 0.5, dtype=np.float32))
        batch, parts = (
            batch.with_columns({"trajectory_share": share}),
            [part.with_columns({"trajectory_share": Column(share.values[: len(part)])}) for part in parts],
        )
        available.append("trajectory_share")
    spec = LossSpec(aggregation=aggregation, **policy)
    corrections = {"correction": RolloutCorrectionSpec(**correction)} if correction else {}
    objective = PolicyObjective(spec, 1.0, available, longest_response=5, **corrections)
    for pieces in ([batch], parts):
        loss, _, metrics = train(pieces, objective, logits)
        # Weights are float32, one fifth for example.
        assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-6, abs=1e-10)


@settings(deadline=None)
@given(
    cut_batches(),
    st.lists(st.integers(0, 35), max_size=3),
    st.sampled_from([*POLICIES, *MARKED]),
    st.sampled_from(CORRECTIONS),
    st.booleans(),
)
def test_a_sum_over_tokens_has_the_same_gradient_however_tokens_are_cut(cut, cuts, policy, correction, is_old):
    batch, logits, _ = cut
    spec = LossSpec(kl_coef=0.3, entropy_coef=0.1, **policy)
    corrections = {"correction": RolloutCorrectionSpec(**correction)} if correction else {}
    objective = PolicyObjective(spec, 1.0, (*ALL, "rollout_logprob"), **corrections, old_is_rollout=is_old)
    token_loss = objective.token_loss()
    of_responses = policy["policy"] in OF_RESPONSES or "off_policy_delta" in policy
    corrects = correction and correction.get("rollout_is", correction.get("rollout_rs"))
    corrects_responses = corrects and not corrects.startswith("token")
    assert (token_loss is None) == bool(of_responses or corrects_responses)
    if token_loss is None:
        return
    logits = logits.requires_grad_()
    tokens = packed(batch, objective, logits, objective.token_weights(batch)[1])
    (expected,) = torch.autograd.grad(objective(tokens)[0], logits, retain_graph=True)
    found = torch.zeros_like(logits)
    bounds = sorted({0, len(tokens.row), *(cut for cut in cuts if cut < len(tokens.row))})
    for part in map(slice, bounds, bounds[1:]):
        columns = {name: column[part] for name, column in tokens.columns.items()}
        assert tokens.entropy is not None
        some = replace(
            tokens,
            logprob=tokens.logprob[part],
            entropy=tokens.entropy[part],
            weight=tokens.weight[part],
            columns=columns,
            row=tokens.row[part],
        )
        found += torch.autograd.grad(token_loss(some), logits, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("aggregation", "weights", "normalizer"),
    [
        ("token-mean", [1, 1, 0, 1, 0], 3),
        ("seq-mean-token-sum", [1, 1, 0, 1, 0], 2),
        ("seq-mean-token-mean", [0.5, 0.5, 0, 1, 0], 2),
        ("seq-mean-token-sum-norm", [0.125, 0.125, 0, 0.125, 0], 2),
    ],
)
def test_weights_of_the_aggregations(aggregation, weights, normalizer):
    # Three tokens of which two count, one that counts, one that does not, none: two responses can be trained on.
    batch, _ = make_batch([[1, 1, 0], [1], [0], []], seed=0)
    objective = PolicyObjective(LossSpec(aggregation=aggregation), 1.0, (), longest_response=8)
    column, share = objective.token_weights(batch)
    assert column.values.tolist() == weights
    assert column.lengths.tolist() == [3, 1, 1, 0]
    assert share == (normalizer,)


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        # On policy the token losses are -A = -1, -2 | -6.
        # Mean of the three; half the sum of -3 and -6; half the sum of the means -1.5 and -6; an eighth of the second.
        ("token-mean", -3.0),
        ("seq-mean-token-sum", -4.5),
        ("seq-mean-token-mean", -3.75),
        ("seq-mean-token-sum-norm", -0.5625),
    ],
)
def test_aggregations_of_an_on_policy_batch(aggregation, loss):
    batch, logits = make_batch([[1, 1], [1]], seed=0)
    batch = batch.with_columns({"advantage": Column.ragged([[1, 2], [6]], "float64")})
    objective = PolicyObjective(LossSpec(aggregation=aggregation), 1.0, (), longest_response=8)
    assert train([batch], objective, logits)[0] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_old_logprobs_the_gradient_is_the_policy_gradient(policy):
    batch, logits = make_batch([[1, 0, 1], [1, 1]], seed=3)
    spec = LossSpec(aggregation="token-mean", **policy)
    _, gradient, metrics = train([batch], PolicyObjective(spec, 1.0, ("advantage",)), logits)
    # d(-A log p(token)) / d logits = -A (one-hot - p), averaged over the four tokens that count.
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(batch["response_tokens"].values), VOCAB)
    weight = torch.from_numpy(batch["advantage"].values * batch["response_mask"].values) / 4
    torch.testing.assert_close(gradient, -weight[:, None] * (one_hot - logits.softmax(-1)), atol=1e-14, rtol=0)
    assert (metrics["ratio/mean"], metrics["ratio/clip_fraction"], metrics["kl/old"]) == (1.0, 0.0, 0.0)


def test_old_logprobs_of_the_same_weights_give_ratio_one_exactly():
    batch, logits = make_batch([[1, 1], [1]], seed=4)
    objective = PolicyObjective(LossSpec(), 1.0, ("old_logprob",))
    current = packed(batch, objective, logits, (1.0,)).logprob
    same = batch.with_columns({"old_logprob": Column(current.numpy(), batch["response_tokens"].offsets)})
    loss, gradient, metrics = train([same], objective, logits)
    assert metrics["ratio/mean"] == 1.0
    without = train([batch], PolicyObjective(LossSpec(), 1.0, ()), logits)
    assert loss == without[0]
    assert torch.equal(gradient, without[1])


def two_tokens(**columns: list[float]) -> ResponseTokens:
    """Probabilities 1/2 and 1/4 now, weights 1/2 each; then a token of weight 0 whose numbers are absurd."""
    return ResponseTokens(
        logprob=torch.tensor([math.log(0.5), math.log(0.25), -900.0], dtype=torch.float64, requires_grad=True),
        entropy=torch.tensor([1.0, 3.0, 50.0], dtype=torch.float64),
        weight=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64),
        columns={name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()},
        row=torch.zeros(3, dtype=torch.int64),
    )


def test_loss_and_metrics_of_two_tokens():
    tokens = two_tokens(
        advantage=[1.0, -1.0, 9.0],
        old_logprob=[math.log(0.25), math.log(0.5), 900.0],
        ref_logprob=[math.log(0.25), math.log(0.25), 900.0],
    )
    objective = PolicyObjective(LossSpec(kl_coef=0.1, kl_estimator="k1", entropy_coef=0.01), 1.0, ALL)
    loss, metrics = objective(tokens)
    loss.backward()
    # Ratios 2 and 1/2 with advantages 1 and -1: both clipped, losses -1.2 and 0.8, mean -0.2. k1: log 2 and 0, mean
    # 0.3465736. Entropy 2. Together -0.2 + 0.1 * 0.3465736 - 0.01 * 2 = -0.18534264.
    assert loss.item() == pytest.approx(-0.18534264097, abs=1e-10)
    # Only the KL pulls: 0.1 * 1/2 for each token; nothing for the one without weight.
    assert tokens.logprob.grad.tolist() == pytest.approx([0.05, 0.05, 0.0], abs=1e-15)
    # k3 of old || policy: exp(log(policy / old)) - 1 - log(policy / old) = 2 - 1 - log 2 and 1/2 - 1 + log 2: mean 1/4.
    stats = read_tallies([metrics])
    assert {name: stat.mean for name, stat in stats.items()} == pytest.approx(
        {
            "loss/policy": -0.2,
            "ratio/mean": 1.25,
            "ratio/clip_fraction": 1.0,
            "kl/old": 0.25,
            "kl/ref": 0.34657359028,
            "entropy": 2.0,
        },
        abs=1e-10,
    )
    assert stats["entropy"].count == 2


def test_the_upper_clip_of_the_spec_is_used():
    tokens = two_tokens(advantage=[1.0, 0.0, 0.0], old_logprob=[math.log(0.25), math.log(0.25), 0.0])
    # Ratio 2, advantage 1: clipped at 1.5, weight 1/2; the other token gives 0.
    loss, _ = PolicyObjective(LossSpec(clip_ratio_high=0.5), 1.0, ("old_logprob",))(tokens)
    assert loss.item() == pytest.approx(-0.75, abs=1e-12)


def test_the_divergence_is_reported_but_not_charged_at_coefficient_0():
    tokens = two_tokens(advantage=[0.0, 0.0, 0.0], ref_logprob=[math.log(0.25), math.log(0.25), 0.0])
    loss, metrics = PolicyObjective(LossSpec(), 1.0, ("ref_logprob",))(tokens)
    loss.backward()
    # k3 = 1/2 - 1 + log 2 for the first token, 0 for the second.
    assert read_tallies([metrics])["kl/ref"].total == pytest.approx(0.1931471805599453, abs=1e-12)
    assert loss.item() == 0.0
    assert tokens.logprob.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
def test_a_token_far_from_the_reference_adds_ten_and_is_counted(estimator):
    # Log-probs 88 and log 2 apart: k3 would be e^88 of the first, infinite in float32, and is 10; 2 - 1 - log 2 of the
    # second. Weights 1/2 each; the third token has none.
    reference = [math.log(0.5) + 88, math.log(0.5), 900.0]
    tokens = two_tokens(advantage=[0.0, 0.0, 0.0], ref_logprob=reference)
    objective = PolicyObjective(LossSpec(kl_coef=0.1, kl_estimator=estimator), 1.0, ("ref_logprob",))
    loss, metrics = objective(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(0.05 * (10 + 1 - math.log(2)), abs=1e-12)
    # 1 - exp(log 2) and, at the bound, 0; with the plus d of each.
    pull = {"k3": [0.0, -1.0], "k3+": [-88.0, -math.log(2)]}[estimator]
    assert tokens.logprob.grad.tolist() == pytest.approx([0.05 * pull[0], 0.05 * pull[1], 0.0], abs=1e-12)
    stats = read_tallies([metrics])
    assert (stats["kl/clip_fraction"].mean, stats["kl/ref"].high) == (0.5, 10.0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "abs", "k1+", "abs+"])
def test_estimators_without_a_bound_count_nothing(estimator):
    tokens = two_tokens(advantage=[0.0] * 3, ref_logprob=[0.0] * 3)
    _, metrics = PolicyObjective(LossSpec(kl_estimator=estimator), 1.0, ("ref_logprob",))(tokens)
    assert "kl/ref" in metrics and "kl/clip_fraction" not in metrics


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", ["advantage", "old_logprob", "ref_logprob", "rollout_logprob"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_that_is_not_finite_has_a_gradient_that_is_not(policy, column, wrong):
    """The optimizer looks at gradients alone, and those of clamp(), maximum() and relu() are 0 where a value is NaN."""
    values = {name: [-1.0, -1.0, 0.0] for name in ("advantage", "old_logprob", "ref_logprob", "rollout_logprob")}
    values[column][0] = wrong
    tokens = two_tokens(**values)
    objective = PolicyObjective(
        LossSpec(**policy, kl_coef=0.1, kl_estimator="k3"),
        1.0,
        values,
        correction=RolloutCorrectionSpec(rollout_is="token"),
    )
    loss, _ = objective(tokens)
    loss.backward()
    assert math.isfinite(loss.item()) == bool(tokens.logprob.grad.isfinite().all())
    # Infinite log-probs have ratios within their bounds with some losses; what is no number has none. Of the
    # generator's log-probs the correction drops both.
    read = column != "old_logprob" or policy["policy"] not in ("reinforce", "opmd")
    read = read and column != "rollout_logprob"
    if math.isnan(wrong) and read:
        assert not math.isfinite(loss.item())


def test_columns_are_those_that_the_pipeline_has():
    assert PolicyObjective(LossSpec(), 0.7, ()).columns == ("advantage",)
    objective = PolicyObjective(LossSpec(), 0.7, ("reward", "ref_logprob", "old_logprob"))
    assert objective.columns == ("advantage", "old_logprob", "ref_logprob")
    assert objective.temperature == 0.7


def test_entropy_can_be_left_out_unless_the_loss_needs_it():
    assert not PolicyObjective(LossSpec(), 1.0, (), needs_entropy=False).needs_entropy
    assert PolicyObjective(LossSpec(entropy_coef=0.1), 1.0, (), needs_entropy=False).needs_entropy
    batch, logits = make_batch([[1]], seed=0)
    assert "entropy" not in train([batch], PolicyObjective(LossSpec(), 1.0, (), needs_entropy=False), logits)[2]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_micro_batch_adds_nothing(policy):
    batch, logits = make_batch([[1, 1]], seed=5)
    objective = PolicyObjective(LossSpec(**policy), 1.0, ())
    nothing = batch.take(np.zeros(0, dtype=np.int64))
    loss, gradient, metrics = train([nothing, batch, nothing], objective, logits)
    alone = train([batch], objective, logits)
    assert loss == alone[0]
    assert torch.equal(gradient, alone[1])
    assert metrics == alone[2]


@pytest.mark.parametrize("mask", [[[]], [[], []], [[0], [0, 0]], [[], [0], []], [[], [1, 1], []]], ids=str)
@pytest.mark.parametrize("policy", [*POLICIES, *MARKED], ids=str)
def test_responses_without_tokens_give_a_finite_loss_and_no_gradient(policy, mask):
    batch, logits = make_batch(mask, seed=5)
    parts = [batch.take(np.array([row])) for row in range(len(batch))]
    for aggregation, correction in zip(itertools.cycle(get_args(Aggregation)), CORRECTIONS, strict=False):
        spec = LossSpec(aggregation=aggregation, kl_coef=0.3, entropy_coef=0.1, **policy)
        corrections = {"correction": RolloutCorrectionSpec(**correction)} if correction else {}
        objective = PolicyObjective(spec, 1.0, (*ALL, "rollout_logprob"), longest_response=5, **corrections)
        for pieces in ([batch], parts):
            loss, gradient, metrics = train(pieces, objective, logits)
            assert math.isfinite(loss) and gradient.isfinite().all()
            if any(map(any, mask)):
                assert all(map(math.isfinite, metrics.values()))
            else:
                assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_token_of_weight_0_cannot_spoil_the_loss(policy):
    absurd = {"advantage": [1.0, -1.0, 9.0], "old_logprob": [math.log(0.25), math.log(0.5), 900.0]}
    tokens = two_tokens(**absurd)
    loss, metrics = PolicyObjective(LossSpec(**policy), 1.0, ("old_logprob",))(tokens)
    loss.backward()
    assert tokens.logprob.grad[2] == 0
    tame = two_tokens(advantage=absurd["advantage"], old_logprob=[*absurd["old_logprob"][:2], -900.0])
    same_loss, same_metrics = PolicyObjective(LossSpec(**policy), 1.0, ("old_logprob",))(tame)
    assert math.isfinite(loss.item())
    assert (loss.item(), read_tallies([metrics])) == (same_loss.item(), read_tallies([same_metrics]))


@pytest.mark.parametrize(
    ("spec", "loss", "gradients"),
    [
        # Ratios 2 and 1/2 with advantages 1 and -1, weights 1/2 each. The first token, held back, does not count; the
        # second is clipped at 0.8.
        ({"policy": "clip_cov"}, 0.4, [0, 0]),
        # -2 + 0.3 log 2, with gradient -2 + 0.3, and 1/2 with gradient 1/2.
        ({"policy": "kl_cov", "kl_cov_coef": 0.3}, -0.75 + 0.15 * math.log(2), [-0.85, 0.25]),
    ],
)
def test_tokens_that_cost_entropy_are_held_back(spec, loss, gradients):
    old = [math.log(0.25), math.log(0.5), 900.0]
    tokens = two_tokens(advantage=[1.0, -1.0, 9.0], old_logprob=old, clip_cov_mask=[1.0, 0.0, 1.0])
    objective = PolicyObjective(LossSpec(**spec), 1.0, ("old_logprob",))
    assert objective.columns == ("advantage", "old_logprob", "clip_cov_mask")
    result, _ = objective(tokens)
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-12)
    assert tokens.logprob.grad.tolist() == pytest.approx([*gradients, 0], abs=1e-12)


def with_an_advantage_a_response(seed: int) -> tuple[Batch, torch.Tensor, np.ndarray, np.ndarray]:
    """Four responses, the last without a token to train on: batch, logits, row of each token, advantage of each row."""
    batch, logits = make_batch([[1, 1, 0], [1], [1, 1, 1, 1], [0]], seed=seed)
    rows = np.repeat(np.arange(4), batch["response_mask"].lengths)
    of_rows = np.array([0.75, -0.5, -2.0, 7.0])
    return (
        batch.with_columns({"advantage": Column(of_rows[rows], batch["response_mask"].offsets)}),
        logits,
        rows,
        of_rows,
    )


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    """The paper's objective on probabilities, by autograd: sign(A) (prod of min(A' r, A' clip(r)))^(1/n) |A|."""
    batch, logits, rows, of_rows = with_an_advantage_a_response(seed=8)
    spec = LossSpec(policy="gmpo", clip_ratio=0.3, clip_ratio_high=0.4)
    loss, gradient, metrics = train([batch], PolicyObjective(spec, 1.0, ALL), logits)

    weights = logits.clone().requires_grad_()
    probability = weights.softmax(-1)[np.arange(len(rows)), batch["response_tokens"].values]
    terms, clipped = [], 0
    for response in range(3):
        mine = np.flatnonzero((rows == response) & (batch["response_mask"].values > 0))
        sign, product = np.sign(of_rows[response]), 1.0
        for token in mine:
            ratio = probability[token] / math.exp(batch["old_logprob"].values[token])
            bounded = ratio.clamp(math.exp(-0.3), math.exp(0.4))
            product = product * sign * torch.minimum(sign * ratio, sign * bounded)
            clipped += (sign * bounded < sign * ratio).item()
        terms.append(product ** (1 / len(mine)) * of_rows[response])
    objective = sum(terms) / 3
    objective.backward()
    assert loss == pytest.approx(-objective.item(), abs=1e-12)
    torch.testing.assert_close(gradient, -weights.grad, atol=1e-12, rtol=0)
    assert metrics["ratio/clip_fraction"] == pytest.approx(clipped / 7)
    assert 0 < clipped < 7


def test_kimis_mirror_descent_pulls_as_the_squared_error_of_its_optimum_does():
    """The surrogate of the paper, (r - b - tau log(pi(y) / pi_old(y)))^2 / 2 tau, by autograd on whole responses."""
    batch, logits = make_batch([[1, 1, 0], [1], [1, 1, 1, 1]], seed=8)
    rows = np.repeat(np.arange(3), batch["response_mask"].lengths)
    of_rows, tau = np.array([1.5, -0.5, -2.0]), 0.7
    batch = batch.with_columns({"advantage": Column(of_rows[rows], batch["response_mask"].offsets)})
    spec = LossSpec(policy="opmd_kimi", tau=tau, aggregation="seq-mean-token-sum")
    _, gradient, _ = train([batch], PolicyObjective(spec, 1.0, ALL), logits)

    weights = logits.clone().requires_grad_()
    probability = weights.softmax(-1)[np.arange(len(rows)), batch["response_tokens"].values]
    errors = []
    for response in range(3):
        mine = np.flatnonzero((rows == response) & (batch["response_mask"].values > 0))
        ratio = probability[mine].prod() / np.exp(batch["old_logprob"].values[mine]).prod()
        errors.append((of_rows[response] - tau * ratio.log()) ** 2 / (2 * tau))
    (sum(errors) / 3).backward()
    torch.testing.assert_close(gradient, weights.grad, atol=1e-12, rtol=0)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6]], [[4, 0, 2], [5, 6, 1, 3]]])
def test_pairwise_mirror_descent_pulls_as_the_squares_of_all_differences_do(parts):
    """The sum over pairs of (a_i - a_j)^2, a = A - tau log(pi(y) / pi_old(y)), by autograd, however groups are cut."""
    batch, logits = make_batch([[1, 1, 0], [1], [1, 1, 1, 1], [1], [0], [1, 1], [1]], seed=9)
    groups, of_rows = np.array([7, 3, 7, 3, 7, 3, 5]), np.array([1.5, -0.5, -2.0, 0.25, 9.0, 1.0, 4.0])
    tau, rows = 0.7, np.repeat(np.arange(7), batch["response_mask"].lengths)
    advantage = Column(of_rows[rows], batch["response_mask"].offsets)
    batch = batch.with_columns({"advantage": advantage, "group_id": Column(groups)})
    spec = LossSpec(policy="opmd_pairwise", tau=tau, aggregation="seq-mean-token-sum")
    objective = PolicyObjective(spec, 1.0, ALL)
    assert "group_id" in objective.columns, "engines keep groups together for that"
    _, gradient, _ = train([batch.take(np.array(part)) for part in parts], objective, logits)

    weights = logits.clone().requires_grad_()
    probability = weights.softmax(-1)[np.arange(len(rows)), batch["response_tokens"].values]
    total = 0.0
    for group in ([0, 2], [1, 3, 5]):
        worth = []
        for response in group:
            mine = np.flatnonzero((rows == response) & (batch["response_mask"].values > 0))
            ratio = probability[mine].prod() / np.exp(batch["old_logprob"].values[mine]).prod()
            worth.append(of_rows[response] - tau * ratio.log())
        pairs = [(one - other) ** 2 for place, one in enumerate(worth) for other in worth[:place]]
        total = total + sum(pairs) / (2 * tau * len(group))
    # The response without a token that counts is in no mean; the one without any other to its prompt is in no pair.
    (total / 6).backward()
    torch.testing.assert_close(gradient, weights.grad, atol=1e-12, rtol=0)


def test_gspo_is_the_mean_over_responses_of_their_clipped_ratio():
    """Equation 5 of the paper, on probabilities of whole responses, by autograd."""
    batch, logits, rows, of_rows = with_an_advantage_a_response(seed=6)
    spec = LossSpec(policy="gspo", clip_ratio=0.3, clip_ratio_high=0.4)
    loss, gradient, metrics = train([batch], PolicyObjective(spec, 1.0, ALL), logits)

    weights = logits.clone().requires_grad_()
    probability = weights.softmax(-1)[np.arange(len(rows)), batch["response_tokens"].values]
    terms, clipped = [], 0
    for response in range(3):
        mine = np.flatnonzero((rows == response) & (batch["response_mask"].values > 0))
        old = np.exp(batch["old_logprob"].values[mine]).prod()
        ratio = (probability[mine].prod() / old) ** (1 / len(mine))
        terms.append(torch.minimum(ratio * of_rows[response], ratio.clamp(0.7, 1.4) * of_rows[response]))
        clipped += len(mine) * (ratio.item() > 1.4 if of_rows[response] > 0 else ratio.item() < 0.7)
    objective = sum(terms) / 3
    objective.backward()
    assert loss == pytest.approx(-objective.item(), abs=1e-12)
    torch.testing.assert_close(gradient, -weights.grad, atol=1e-12, rtol=0)
    assert metrics["ratio/clip_fraction"] == pytest.approx(clipped / 7)
    assert 0 < clipped < 7, "the test needs responses on both sides of the clip"


def test_the_default_aggregation_is_the_papers():
    assert LossSpec().weighting == LossSpec(policy="cispo").weighting == "token-mean"
    assert LossSpec(policy="gspo").weighting == "seq-mean-token-mean"
    assert LossSpec(policy="gspo", aggregation="token-mean").weighting == "token-mean"


@pytest.mark.parametrize("policy", ["ppo_clip", "gspo", "cispo", "cpgd"])
def test_the_clips_of_the_spec_reach_the_loss(policy):
    # Ratios 2, 2 with advantages above 0, then 1/2, 1/2 with such below: clipped by 0.2, not by bounds further off.
    columns = {"advantage": [1.0, 1.0, 0.0], "old_logprob": [math.log(0.25), math.log(0.125), 0.0]}
    spec = LossSpec(policy=policy)
    _, metrics = PolicyObjective(spec, 1.0, ("old_logprob",))(two_tokens(**columns))
    assert read_tallies([metrics])["ratio/clip_fraction"].total == 2
    wide = LossSpec(policy=policy, clip_ratio_high=1.5)
    _, metrics = PolicyObjective(wide, 1.0, ("old_logprob",))(two_tokens(**columns))
    assert read_tallies([metrics])["ratio/clip_fraction"].total == 0
    if policy != "cispo":
        down = {"advantage": [-1.0, -1.0, 0.0], "old_logprob": [0.0, math.log(0.5), 0.0]}
        _, metrics = PolicyObjective(spec, 1.0, ("old_logprob",))(two_tokens(**down))
        assert read_tallies([metrics])["ratio/clip_fraction"].total == 2
        _, metrics = PolicyObjective(LossSpec(policy=policy, clip_ratio=0.6), 1.0, ("old_logprob",))(two_tokens(**down))
        assert read_tallies([metrics])["ratio/clip_fraction"].total == 0


@pytest.mark.parametrize("policy", ["none", "ppo_clip"])
def test_a_divergence_from_a_teacher_is_a_term_of_the_loss(policy):
    batch, logits = make_batch([[1, 0, 1], [1, 1]], seed=3)
    teacher = batch["old_logprob"].values + 0.5
    teacher[3:] = np.nan  # The second row has no teacher.
    batch = batch.with_columns(
        {
            "teacher_logprob": Column(teacher, batch["old_logprob"].offsets),
            "teacher_mask": Column(np.array([1.0, 0.0], dtype=np.float32)),
        }
    )
    available = ("advantage", "teacher_logprob", "teacher_mask")
    spec = LossSpec(policy=policy, distillation={"divergence": "k2", "coef": 0.3})
    objective = PolicyObjective(spec, 1.0, available)
    assert ("advantage" in objective.columns) == (policy != "none")
    parts = [batch.take(np.array([1])), batch.take(np.array([0]))]
    _, gradient, metrics = train(parts, objective, logits)
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(batch["response_tokens"].values), VOCAB)
    apart = (logits.log_softmax(-1) * one_hot).sum(-1).numpy() - teacher
    # k2 has the gradient of d log p, over the four tokens that count.
    pull = 0.3 * np.array([apart[0], 0, apart[2], 0, 0])
    if policy != "none":
        pull -= batch["advantage"].values * batch["response_mask"].values
    expected = torch.from_numpy(pull / 4)[:, None] * (one_hot - logits.softmax(-1))
    torch.testing.assert_close(gradient, expected, atol=1e-14, rtol=0)
    assert metrics["distillation/loss"] == pytest.approx((apart[0] ** 2 + apart[2] ** 2) / 4)
    assert ("loss/policy" in metrics) == (policy != "none")


@pytest.mark.parametrize("divergence", ["k2", "jsd"])
def test_a_divergence_is_weighed_by_the_ratio_up_to_a_bound(divergence):
    """SDPO's `is_clip`: the factor has no gradient, and is 1 without log-probs before the update."""
    logprob, row = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True), torch.tensor([0, 0, 1])
    candidates = torch.tensor([[-1.0, -2.0]] * 3, dtype=torch.float64, requires_grad=True)
    columns = {
        # Ratios of 0.5, e and 1.
        "old_logprob": torch.tensor([-1 + math.log(2), -2.0, -1.0]),
        "teacher_logprob": torch.tensor([-3.0, -3.0, -3.0]),
        "teacher_topk_ids": torch.tensor([[4, 2]] * 3),
        "teacher_topk_logprob": torch.tensor([[-1.5, -0.5]] * 3),
    }
    tokens = ResponseTokens(logprob, None, torch.ones(3), columns, row, (), candidates)
    slopes = {}
    for is_clip in (None, 2.0):
        loss = LossSpec(policy="none", distillation={"divergence": divergence, "is_clip": is_clip})
        objective = PolicyObjective(loss, 1.0, columns, needs_entropy=False)
        assert objective.candidates == ("teacher_topk_ids" if divergence == "jsd" else None)
        share, _ = objective(tokens)
        slopes[is_clip] = torch.autograd.grad(share, candidates if divergence == "jsd" else logprob)[0]
    factors = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    weighed = slopes[None] * (factors[:, None] if divergence == "jsd" else factors)
    torch.testing.assert_close(slopes[2.0], weighed, rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy", ["ppo_clip", "reinforce", "gspo"])
def test_the_off_policy_mask_leaves_divergence_entropy_and_normalizer_alone(policy):
    """The loss without the policy's part of the first token, whose advantage is below 0 and probability halved."""
    columns = {
        "advantage": [-1.0, 1.0, 0.0],
        "old_logprob": [0.0, math.log(0.25), 0.0],
        "ref_logprob": [math.log(0.25)] * 2 + [0.0],
    }
    options = {"policy": policy, "kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01}
    found = {}
    for delta in (None, 0.3, 0.4):
        # The mean of -log r over the response is log 2 / 2 = 0.347.
        tokens = two_tokens(**columns)
        loss, metrics = PolicyObjective(LossSpec(**options, off_policy_delta=delta), 1.0, ALL)(tokens)
        loss.backward()
        found[delta] = loss.item(), tokens.logprob.grad.tolist(), read_tallies([metrics])
    assert found[0.4][:2] == found[None][:2]
    alone, kept = two_tokens(**{**columns, "advantage": [0.0, 1.0, 0.0]}), found[0.3]
    loss, _ = PolicyObjective(LossSpec(**options), 1.0, ALL)(alone)
    loss.backward()
    assert kept[:2] == (pytest.approx(loss.item()), pytest.approx(alone.logprob.grad.tolist()))
    assert (kept[2]["ratio/off_policy_fraction"].mean, found[0.4][2]["ratio/off_policy_fraction"].mean) == (0.5, 0)


def test_an_unbiased_estimate_of_a_token_weighs_the_ratio_to_the_old_policy():
    # Ratio 2 and d = log 2 of the first, none of the second: r k3 = 2 (1/2 - 1 + log 2), with gradient r d = 2 log 2.
    tokens = two_tokens(
        advantage=[0.0] * 3, old_logprob=[math.log(0.25)] * 2 + [0.0], ref_logprob=[math.log(0.25)] * 2 + [0.0]
    )
    loss, metrics = PolicyObjective(LossSpec(kl_coef=0.1, kl_estimator="k3*"), 1.0, ALL)(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(0.05 * (2 * math.log(2) - 1), abs=1e-12)
    assert tokens.logprob.grad.tolist() == pytest.approx([0.05 * 2 * math.log(2), 0.0, 0.0], abs=1e-12)
    assert read_tallies([metrics])["kl/clip_fraction"].mean == 0
