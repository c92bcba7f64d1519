"""Sizes and formulas of the frameworks, computed as they do, and as the translated pipeline does."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagrl.algorithms.aggregation import token_weights
from dagrl.algorithms.kl import kl_estimate
from dagrl.config.schema.nodes.update import RolloutCorrectionSpec, UpdateNode
from dagrl.data.batch import Column
from dagrl.importing.parts import kl_estimator
from dagrl.importing.roll.common import devices

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = st.integers(1, 12)
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def optimizer_steps(tree):
    node = {"op": "update", "engine": "actor"}
    node |= {name: tree[f"nodes.update.{name}"] for name in ("mini_batch", "epochs") if f"nodes.update.{name}" in tree}
    return UpdateNode.model_validate(node).optimizer_steps(tree["data.prompts_per_step"])


def samples_per_optimizer_step(tree):
    prompts = tree["data.prompts_per_step"]
    return tree.get("nodes.update.mini_batch", prompts) * tree["nodes.rollout.n"]


@quick
@given(mini=SIZES, times=SIZES, n=SIZES, epochs=st.integers(1, 3), dp=st.integers(1, 4))
def test_verl_counts_prompts_in_a_mini_batch(translated, mini, times, n, epochs, dp):
    # verl: each rank has train_batch * n / dp samples, in mini-batches of ppo_mini_batch_size * n / dp.
    batch = mini * dp * times
    tree = translated(
        "verl",
        {
            "data.train_batch_size": batch,
            f"{ACTOR}.ppo_mini_batch_size": mini * dp,
            f"{ACTOR}.ppo_epochs": epochs,
            f"{ROLLOUT}.n": n,
        },
    )
    of_rank, mini_of_rank = batch * n // dp, mini * dp * n // dp
    assert optimizer_steps(tree) == of_rank // mini_of_rank * epochs
    assert samples_per_optimizer_step(tree) == mini_of_rank * dp


@quick
@given(mini=SIZES, times=SIZES, n=SIZES, by_steps=st.booleans())
def test_slime_counts_samples_in_a_global_batch(translated, mini, times, n, by_steps):
    # slime: num_steps_per_rollout = rollout_batch_size * n_samples_per_prompt / global_batch_size.
    size = {"--num-steps-per-rollout": times} if by_steps else {"--global-batch-size": mini * n}
    tree = translated("slime", {"--rollout-batch-size": mini * times, "--n-samples-per-prompt": n, **size})
    assert optimizer_steps(tree) == times
    assert samples_per_optimizer_step(tree) == mini * n


@quick
@given(rows=SIZES, accumulation=SIZES, dp=st.integers(1, 4), tp=st.integers(1, 2), times=SIZES, n=SIZES)
def test_roll_counts_rows_of_a_rank(translated, rows, accumulation, dp, tp, times, n):
    # ROLL: backward steps of a rank = (rollout_batch_size * n // dp) // (rows * accumulation).
    mini = rows * accumulation * dp
    batch = mini * times  # so that batch * n is a multiple of n mini-batches
    role = "actor_train"
    tree = translated(
        "roll",
        {
            "rollout_batch_size": batch,
            "num_return_sequences_in_group": n,
            f"{role}.training_args.per_device_train_batch_size": rows * n,
            f"{role}.training_args.gradient_accumulation_steps": accumulation,
            f"{role}.strategy_args.strategy_name": "megatron_train",
            f"{role}.strategy_args.strategy_config.tensor_model_parallel_size": tp,
            f"{role}.device_mapping": f"list(range(0,{dp * tp}))",
        },
    )
    assert optimizer_steps(tree) == (batch * n // dp) // (rows * n * accumulation)
    assert samples_per_optimizer_step(tree) == rows * n * accumulation * dp


@quick
@given(batch=SIZES, interval=SIZES, n=SIZES, steps=SIZES)
def test_trinity_syncs_after_some_optimizer_steps(translated, batch, interval, n, steps):
    tree = translated(
        "trinity",
        {
            "buffer.batch_size": batch,
            "synchronizer.sync_interval": interval,
            "algorithm.repeat_times": n,
            "buffer.total_steps": steps * interval,
            "trainer.save_interval": 2 * interval,
            "algorithm.optimizer.lr_warmup_steps": 3 * interval,
        },
    )
    assert optimizer_steps(tree) == interval
    assert samples_per_optimizer_step(tree) == batch * n
    assert optimizer_steps(tree) * tree["run.steps"] == steps * interval
    assert tree["run.save_every"] == 2
    assert tree["engines.actor.lr_schedule.lr_warmup_steps"] == 3


@pytest.mark.parametrize(
    ("framework", "given_settings", "formula"),
    [
        ("verl", {}, lambda rows: np.concatenate(rows).mean()),
        ("verl", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}, lambda rows: np.mean([r.sum() for r in rows])),
        ("verl", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, lambda rows: np.mean([r.mean() for r in rows])),
        (
            "verl",
            {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
            lambda rows: np.mean([r.sum() for r in rows]) / 512,
        ),
        ("slime", {}, lambda rows: np.mean([r.mean() for r in rows])),
        ("slime", {"--calculate-per-token-loss": True}, lambda rows: np.concatenate(rows).mean()),
        ("roll", {}, lambda rows: np.mean([r.mean() for r in rows])),
        ("trinity", {}, lambda rows: np.concatenate(rows).mean()),
    ],
)
def test_losses_are_normalized_as_there(translated, framework, given_settings, formula):
    rows = [np.array([1.0, 2.0, 6.0]), np.array([4.0]), np.array([-3.0, 1.0])]
    tree = translated(framework, given_settings)
    mask = Column.ragged([np.ones(len(row)) for row in rows], "float32")
    longest = tree.get("nodes.rollout.sampling.max_new_tokens", 512)
    weights, normalizer = token_weights(mask, tree["nodes.update.loss.aggregation"], longest)
    assert weights.values @ np.concatenate(rows) / normalizer == pytest.approx(formula(rows))


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("kl", lambda d: d),
        ("abs", lambda d: d.abs()),
        ("mse", lambda d: 0.5 * d.square()),
        # verl's low_var_kl: kl = clamp(ref - logprob, -20, 20); clamp(exp(kl) - kl - 1, -10, 10).
        ("low_var_kl", lambda d: torch.clamp(torch.exp((-d).clamp(-20, 20)) - (-d).clamp(-20, 20) - 1, -10, 10)),
    ],
)
def test_divergences_have_verls_values(name, formula):
    d = torch.tensor([-5.0, -1.0, -0.1, 0.0, 0.3, 2.0, 30.0], dtype=torch.float64)
    assert torch.allclose(kl_estimate(d, torch.zeros_like(d), kl_estimator(name)), formula(d))


@quick
@given(low=st.floats(0.05, 0.95), high=st.floats(1.05, 20), ratio=st.floats(0.01, 100))
def test_bounds_of_verls_rejection_are_reciprocal(translated, low, high, ratio):
    prefix = "algorithm.rollout_correction"
    tree = translated("verl", {f"{prefix}.rollout_rs": "token_k1", f"{prefix}.rollout_rs_threshold": f"{low}_{high}"})
    target = "nodes.update.rollout_correction.rollout_rs_threshold"
    there = 1 / ratio  # the generator's probability over the trainer's
    if min(abs(there / low - 1), abs(there / high - 1)) > 1e-9:
        assert (low <= there <= high) == (tree[f"{target}_lower"] <= ratio <= tree[target])


def test_clip_ratio_alone_changes_nothing_in_verl(translated):
    # verl 0.9: clip_ratio_low if it is not None else clip_ratio; clip_ratio_low is 0.2 by default.
    assert translated("verl", {f"{ACTOR}.clip_ratio": 0.1})["nodes.update.loss.clip_ratio"] == 0.2
    nulls = {f"{ACTOR}.clip_ratio": 0.1, f"{ACTOR}.clip_ratio_low": None, f"{ACTOR}.clip_ratio_high": None}
    assert translated("verl", nulls)["nodes.update.loss.clip_ratio"] == 0.1


def test_tokens_of_a_micro_batch(translated):
    lengths = {"data.max_prompt_length": 100, "data.max_response_length": 400}
    padded = translated("verl", {**lengths, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4})
    assert padded["nodes.update.tokens_per_micro_batch"] == 4 * (100 + 400)
    packed = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 3000}
    ulysses = translated("verl", {**lengths, **packed, f"{ACTOR}.ulysses_sequence_parallel_size": 2})
    assert ulysses["nodes.update.tokens_per_micro_batch"] == 6000
    assert ulysses["engines.actor.parallel.context_parallel_size"] == 2


def test_the_policy_waits_one_step_less_than_verls_number(translated):
    # verl trains the policy if critic_warmup <= step, and counts steps from 1.
    tree = translated("verl", {"trainer.critic_warmup": 10})
    assert tree["nodes.update.critic_warmup"] == sum(1 for step in range(1, 100) if not step >= 10)


@pytest.mark.parametrize(
    ("given_settings", "estimator"),
    [
        ({"adv_estimator": "reinforce", "whiten_advantages": True}, "reinforce_plus_plus"),
        (
            {"adv_estimator": "reinforce", "whiten_advantages": True, "norm_mean_type": "group"},
            "reinforce_plus_plus_baseline",
        ),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group"}, "dr_grpo"),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "group"}, "grpo"),
        ({"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"}, "grpo"),
        ({"adv_estimator": "agentic_reinforce", "whiten_advantages": True, "gamma": 0.9}, "agentic_reinforce"),
        ({"adv_estimator": "grpo"}, "grpo"),
        ({}, "gae"),
    ],
)
def test_estimators_of_roll(translated, given_settings, estimator):
    tree = translated("roll", given_settings)
    assert tree["nodes.advantage.estimator"] == estimator
    if estimator == "gae":
        assert tree["nodes.advantage.lam"] == 0.95
    assert tree.get("nodes.advantage.normalize_by_std") == given_settings.get("norm_std_type")
    assert tree.get("nodes.advantage.gamma", 1) == given_settings.get("gamma", 1)


def test_trinitys_deviation_of_the_batch(translated):
    options = {"algorithm.algorithm_type": "grpo", "algorithm.advantage_fn_args.std_cal_level": "batch"}
    tree = translated("trinity", options)
    assert (tree["nodes.advantage.estimator"], tree["nodes.advantage.normalize_by_std"]) == ("grpo", "batch")


@pytest.mark.parametrize(("name", "estimator"), [("grpo_passk", "grpo_passk"), ("gdpo", "grpo"), ("maxrl", "grpo")])
def test_estimators_of_verl(translated, name, estimator):
    tree = translated("verl", {"algorithm.adv_estimator": name, "algorithm.norm_adv_by_std_in_grpo": False})
    assert tree["nodes.advantage.estimator"] == estimator
    assert tree.get("nodes.advantage.normalize_by_std") == (False if name == "grpo_passk" else None)


@pytest.mark.parametrize(
    ("keys", "weights", "rewards"),
    [
        (["right", "format reward"], None, {"right": 1.0, "format_reward": 1.0}),
        (["right", "polite"], [1.0, 0.5], {"right": 1.0, "polite": 0.5}),
        (["score", "polite"], [2.0, 1.0], {"reward": 2.0, "polite": 1.0}),
    ],
)
def test_each_reward_of_gdpo_is_a_node(checked, folder, keys, weights, rewards):
    (folder / "rewards.py").write_text("def compute_score(response):\n    return {'score': 0.0}\n")
    options = {"algorithm.gdpo_reward_keys": keys, "algorithm.gdpo_reward_weights": weights}
    own = {"custom_reward_function.path": "rewards.py", "reward.reward_manager.name": "gdpo"}
    found, problems = checked("verl", {"algorithm.adv_estimator": "gdpo", **options, **own})
    assert problems == []
    assert (found.tree["nodes.advantage.estimator"], found.tree["nodes.advantage.rewards"]) == ("gdpo", rewards)
    written = {found.tree.get(f"nodes.{name}.write", name): found.tree[f"nodes.{name}.fn"] for name in rewards}
    others = {name: f"rewards:{name}" for name in rewards if name != "reward"}
    assert written == others | ({"reward": "rewards:compute_score"} if "reward" in rewards else {})
    decided = {line.key for line in found.lines if line.status == "unknown"}
    assert {f"nodes.{name}.fn" for name in others} <= decided
    assert not any(line.status == "refused" for line in found.lines)


def test_device_mappings_are_read_and_not_evaluated():
    assert devices("list(range(0,4)) + [6, 7]") == [0, 1, 2, 3, 6, 7]
    assert devices("list(range(0, 8, 2))") == [0, 2, 4, 6]
    assert devices([1, 2]) == [1, 2]
    assert devices("__import__('os').system('true')") is None


def test_trinity_gives_the_engines_their_own_gpus(translated):
    tree = translated(
        "trinity", {"cluster.node_num": 2, "cluster.gpu_per_node": 8, "explorer.rollout_model.engine_num": 4}
    )
    groups = {
        name: tree.get(f"groups.{name}.nodes", 1) * tree[f"groups.{name}.gpus_per_node"]
        for name in ("train", "rollout")
    }
    assert groups == {"train": 12, "rollout": 4}
    assert math.gcd(tree["groups.train.gpus_per_node"], 12) == tree["groups.train.gpus_per_node"]


OPTIM = f"{ACTOR}.optim"
TRAINING = "actor_train.training_args"


@pytest.mark.parametrize(
    ("framework", "given_settings", "schedule"),
    [
        ("verl", {f"{OPTIM}.lr_warmup_steps_ratio": 0.05}, {"ratio": 0.05}),
        ("verl", {f"{OPTIM}.lr_warmup_steps_ratio": 0.05, f"{OPTIM}.lr_warmup_steps": 3}, {"steps": 3}),
        ("verl", {f"{OPTIM}.lr_warmup_steps_ratio": 0.1, f"{OPTIM}.lr_decay_steps": 70}, {"steps": 7}),
        ("slime", {"--lr-warmup-fraction": 0.02}, {"ratio": 0.02}),
        ("slime", {"--lr-warmup-fraction": 0.1, "--lr-decay-iters": 70}, {"steps": 7}),
        ("roll", {f"{TRAINING}.warmup_ratio": 0.1}, {"ratio": 0.1}),
        ("roll", {f"{TRAINING}.warmup_ratio": 0.1, f"{TRAINING}.warmup_steps": 4}, {"steps": 4}),
        ("trinity", {"algorithm.optimizer.lr_warmup_steps_ratio": 0.2}, {"ratio": 0.2}),
        ("trinity", {"algorithm.optimizer.lr_warmup_steps": -1}, {}),
        (
            "trinity",
            {"algorithm.optimizer.lr_warmup_steps_ratio": 0.2, "algorithm.optimizer.lr_warmup_steps": 6},
            {"steps": 6},
        ),
    ],
)
def test_a_warmup_by_ratio_stays_one(translated, framework, given_settings, schedule):
    """However long the run is: ``run.steps`` may stand in for a data file that is not here."""
    tree, prefix = translated(framework, given_settings), "engines.actor.lr_schedule.lr_warmup_"
    assert {key.removeprefix(prefix): value for key, value in tree.items() if key.startswith(prefix)} == schedule


def test_gigpo_of_verl_agent_is_over_turns(translated):
    given_settings = {"algorithm.adv_estimator": "gigpo", "algorithm.gamma": 0.95}
    options = {"algorithm.gigpo.mode": "mean_norm", "algorithm.gigpo.step_advantage_w": 0.5}
    tree = translated("verl", {**given_settings, **options, "algorithm.norm_adv_by_std_in_grpo": True})
    names = ("estimator", "mean_over", "normalize_by_std", "gamma", "step_coef")
    assert [tree[f"nodes.advantage.{name}"] for name in names] == ["gigpo", "turns", False, 0.95, 0.5]


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_token_baseline_needs_sums_of_squared_probabilities(translated, name):
    options = {f"{ACTOR}.calculate_sum_pi_squared": True, f"{ACTOR}.sum_pi_squared_checkpointing": False}
    tree = translated("verl", {"algorithm.adv_estimator": name, **options})
    assert tree["nodes.advantage.estimator"] == "optimal_token_baseline"
    assert tree["nodes.old.statistics"] == ["prob_square_sum"]


CORRECTION = "algorithm.rollout_correction"
TOOLS = {"actor_rollout_ref.rollout.multi_turn.enable": True}


@pytest.mark.parametrize(
    ("given_settings", "differences"),
    [
        ({}, []),
        ({f"{CORRECTION}.rollout_is": None, f"{CORRECTION}.rollout_rs": "seq_max_k2"}, []),
        ({f"{CORRECTION}.rollout_is": "token"}, ["rollout_is"]),
        ({f"{CORRECTION}.rollout_is": "sequence", **TOOLS}, ["rollout_is", "tools"]),
        (TOOLS, ["tools"]),
        ({"data.tool_config_path": "tools.yaml"}, ["tools"]),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_differences_of_a_token_baseline_are_noted(translation, name, given_settings, differences):
    key = "algorithm.adv_estimator"
    (line,) = (each for each in translation("verl", {**given_settings, key: name}).lines if each.key == key)
    without_tools = [each for each in differences if each != "tools"]
    known = {"optimal_token_baseline": differences, "tir_optimal_token_baseline": without_tools, "grpo": []}[name]
    notes = line.note.split("; t") if line.note else []
    assert [each in note for each, note in zip(known, notes, strict=True)] == [True] * len(known)


@pytest.mark.parametrize(
    ("given_settings", "correction"),
    [
        # verl's example: bounds of k1 are of the generator's probability over the trainer's.
        (
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_4.0,2.5"},
            {
                "rollout_rs": ["token", "seq_max_k2"],
                "rollout_rs_threshold": [2.0, 2.5],
                "rollout_rs_threshold_lower": [0.25, None],
            },
        ),
        # One threshold is that of all.
        (
            {"rollout_rs": "token_k3, seq_mean_k2", "rollout_rs_threshold": 0.1},
            {"rollout_rs": ["token_k3", "seq_mean_k2"], "rollout_rs_threshold": [0.1, 0.1]},
        ),
        (
            {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "2.0"},
            {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 0.5},
        ),
        ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": "2,3"}, {}),
        ({"rollout_rs": "token_k1,token_k9", "rollout_rs_threshold": 2}, {}),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, {}),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "much"}, {}),
    ],
)
def test_several_criteria_of_verl_each_keep_their_bounds(translated, given_settings, correction):
    tree = translated("verl", {f"{CORRECTION}.{name}": value for name, value in given_settings.items()})
    prefix = "nodes.update.rollout_correction."
    found = {key.removeprefix(prefix): value for key, value in tree.items() if key.startswith(prefix)}
    assert found == correction
    RolloutCorrectionSpec.model_validate(found)


def test_several_filters_of_roll_are_several_criteria(translated):
    filters = "train_infer_correction.filters"
    given_settings = {
        f"{filters}.0.enabled": True,
        f"{filters}.0.agg_type": "token",
        f"{filters}.0.ratio_high": 2.0,
        f"{filters}.1.enabled": False,
        f"{filters}.2.enabled": True,
        f"{filters}.2.agg_type": "geometric",
    }
    tree, prefix = translated("roll", given_settings), "nodes.update.rollout_correction.rollout_rs"
    assert tree[prefix] == ["token", "geometric"]
    assert (tree[f"{prefix}_threshold"], tree[f"{prefix}_threshold_lower"]) == ([2.0, 1.2], [0.8, 0.8])


@pytest.mark.parametrize(("mode", "policy"), [("vanilla", "ppo_clip"), ("gspo", "gspo"), ("kl_cov", "kl_cov")])
@pytest.mark.parametrize("kind", [None, "ppo_clip", "reinforce"])
def test_verls_bypass_counts_the_ratio_to_the_generator_once(translated, kind, mode, policy):
    # compute_policy_loss_bypass_mode: PPO's clip without weights, or REINFORCE with them.
    given_settings = {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": 3.0,
        f"{ACTOR}.policy_loss.loss_mode": mode,
    }
    tree = translated("verl", given_settings | ({f"{CORRECTION}.loss_type": kind} if kind else {}))
    assert tree["nodes.update.read"] == {"old_logprob": "rollout_logprob"}
    weight = tree.get("nodes.update.rollout_correction.rollout_is")
    expected = ("reinforce", "token") if kind == "reinforce" else (policy, None)
    assert (tree.get("nodes.update.loss.policy", "ppo_clip"), weight) == expected
    assert ("nodes.held.op" in tree) == (expected[0] == "kl_cov")
