"""What `dagrl validate` says of advantages and losses."""

import pytest

from dagrl.validation import check_file

UPDATE = "loss: {kl_coef: 0.01}}"
GREEDY = """  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  greedy: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8, temperature: 0}}
  reward: {op: reward, fn: exact, read_from: [rollout]}
  baseline: {op: reward, fn: exact, read_from: [greedy], write: baseline_reward}
  ref: {op: logprob, engine: reference, read_from: [rollout], write: ref_logprob}
  advantage: {op: advantage, read_from: [rollout], estimator: remax}
  update: {op: update, read_from: [rollout], engine: actor, loss: {policy: reinforce, kl_coef: 0.01}}
"""
OWN = """
import dagrl
@dagrl.estimator()
def best(batch, *, bonus): ...
@dagrl.loss(reads=["advantage", "my_weights"])
def weighted(tokens): ...
@dagrl.loss(reads=["advantage", "reward"])
def unclipped(tokens): ...
@dagrl.loss()
def mine(tokens, power=1.0): ...
"""


@pytest.mark.parametrize(
    ("old", "new", "place", "fragment"),
    [
        ("grpo}", "grpo, baseline: mean} #!", "nodes.advantage.baseline", "option-without-effect"),
        ("grpo}", "rloo, tau: 2.0} #!", "nodes.advantage.tau", "option-without-effect"),
        ("grpo}", "rloo, lam: 0.9} #!", "nodes.advantage.lam", "option-without-effect"),
        ("grpo}", "grpo, args: {a: 1}} #!", "nodes.advantage.args", "option-without-effect"),
        ("grpo}", "grpo, lam_value: 0.9} #!", "nodes.advantage.lam_value", "option-without-effect"),
        (
            "grpo}",
            "grpo, length_adaptive_alpha: 0.05} #!",
            "nodes.advantage.length_adaptive_alpha",
            "option-without-effect",
        ),
        ("grpo}", "maxrl, normalize_by_std: false} #!", "nodes.advantage.normalize_by_std", "option-without-effect"),
        (
            "grpo}",
            "grpo_passk, normalize_by_std: batch} #!",
            "nodes.advantage.normalize_by_std",
            "option-without-effect",
        ),
        ("grpo}", "grpo, rewards: {reward: 1}} #!", "nodes.advantage.rewards", "option-without-effect"),
        ("grpo}", "grpo, k: 2} #!", "nodes.advantage.k", "option-without-effect"),
        ("grpo}", "grpo, role: data_set} #!", "nodes.advantage.role", "option-without-effect"),
        ("grpo}", "grpo, decay: 0.9} #!", "nodes.advantage.decay", "option-without-effect"),
        ("grpo}", "gdpo} #!", "nodes.advantage.estimator", "missing-rewards"),
        ("grpo}", "gdpo, rewards: {polite: 1.0}} #!", "nodes.advantage", "missing-column"),
        (
            "grpo}",
            "gdpo, rewards: {reward: 1.0}, kl_in_reward: {coef: 0.1}} #!",
            "nodes.advantage.kl_in_reward",
            "penalty-on-plain-reward",
        ),
        (
            "grpo}",
            "maxrl, overlong_buffer: {len: 2}} #!",
            "nodes.advantage.overlong_buffer",
            "penalty-on-plain-reward",
        ),
        ("grpo}", "passk, length_reward: {}} #!", "nodes.advantage.length_reward", "penalty-on-plain-reward"),
        ("grpo}", "rae, role: player} #!", "nodes.advantage", "missing-column"),
        (UPDATE, "loss: {tau: 0.5}} #!", "nodes.update.loss.tau", "option-without-effect"),
        (UPDATE, "loss: {policy: opmd, clip_ratio: 0.1}} #!", "nodes.update.loss.clip_ratio", "option-without-effect"),
        (UPDATE, "loss: {args: {a: 1}}} #!", "nodes.update.loss.args", "option-without-effect"),
        (
            UPDATE,
            "loss: {policy: 'own_checks:mine', clip_ratio: 0.1}} #!",
            "nodes.update.loss.clip_ratio",
            "option-without-effect",
        ),
        (
            UPDATE,
            "loss: {policy: 'own_checks:mine', args: {pover: 2}}} #!",
            "nodes.update.loss.args",
            "invalid-formula",
        ),
        (
            UPDATE,
            "loss: {policy: 'own_checks:mine'}, epochs: 2} #!",
            "nodes.update.epochs",
            "missing-old-logprob",
        ),
        (
            UPDATE,
            "loss: {policy: 'own_checks:weighted'}} #!",
            "nodes.update",
            "missing-column",
        ),
        (
            UPDATE,
            "loss: {policy: 'own_checks:best'}} #!",
            "nodes.update.loss.policy",
            "invalid-formula",
        ),
        (
            "grpo}",
            "'own_checks:best'} #!",
            "nodes.advantage.estimator",
            "invalid-formula",
        ),
        ("grpo}", "'own_checks:gone'} #!", "nodes.advantage.estimator", "invalid-formula"),
        ("grpo}", "remax} #!", "nodes.advantage", "missing-column"),
        (
            "grpo}",
            "grpo, kl_in_reward: {coef: 0.1, horizon: 9}} #!",
            "nodes.advantage.kl_in_reward.horizon",
            "option-without-effect",
        ),
        (
            UPDATE,
            "loss: {policy: opmd_pairwise}, tokens_per_micro_batch: 95} #!",
            "nodes.update.tokens_per_micro_batch",
            "micro-batch-too-small",
        ),
        (
            UPDATE,
            "loss: {policy: clip_cov}} #!",
            "nodes.update",
            "missing-column",
        ),
        (UPDATE, "loss: {ratio_cap: 2.0}} #!", "nodes.update.loss.ratio_cap", "option-without-effect"),
        (UPDATE, "loss: {half_life: 9}} #!", "nodes.update.loss.half_life", "option-without-effect"),
        (UPDATE, "loss: {policy: fipo, k_pos: 9}} #!", "nodes.update.loss.k_pos", "option-without-effect"),
        (UPDATE, "loss: {policy: vespo, clip_ratio: 0.1}} #!", "nodes.update.loss.clip_ratio", "option-without-effect"),
        (UPDATE, "loss: {policy: dro, dual_clip: 3}} #!", "nodes.update.loss.dual_clip", "option-without-effect"),
        (UPDATE, "loss: {policy: m2po}} #!", "nodes.update", "missing-column"),
        (UPDATE, "loss: {observation_coef: 0.1}} #!", "nodes.update", "missing-column"),
        (
            "  advantage:",
            "  marks: {op: covariance, second_moment: 0.04, share: 0.1} #!\n  advantage:",
            "nodes.marks.share",
            "option-without-effect",
        ),
        (
            "  advantage:",
            "  marks: {op: covariance, second_moment: 0.04, top_entropy: 0.2} #!\n  advantage:",
            "nodes.marks.top_entropy",
            "option-without-effect",
        ),
        (
            "  advantage:",
            "  marks: {op: covariance, top_entropy: 0.2} #!\n  advantage:",
            "nodes.marks",
            "missing-column",
        ),
        (UPDATE, "loss: {kl_cov_coef: 2.0}} #!", "nodes.update.loss.kl_cov_coef", "option-without-effect"),
        (
            "  advantage:",
            "  marks: {op: covariance, between: [5.0, 1.0]} #!\n  advantage:",
            "nodes.marks.between",
            "crossed-bounds",
        ),
        (
            "grpo}",
            "grpo, kl_in_reward: {coef: 0, target_kl: 0.1}} #!",
            "nodes.advantage.kl_in_reward.coef",
            "coefficient-of-zero",
        ),
    ],
)
def test_unknown_and_missing_arguments_of_a_formula_are_reported(project, old, new, place, fragment):
    project.write("own_checks.py", OWN)
    edits = [(old, new)]
    if "covariance" in new:
        edits = [(old, f"  old: {{op: logprob, engine: actor, write: old_logprob}}\n{new}")]
        policy = "m2po" if "second_moment" in new else "clip_cov" if "top_entropy" in new else "kl_cov"
        edits.append((UPDATE, f"loss: {{policy: {policy}, kl_coef: 0.01}}}}"))
    if "kl_in_reward" in new:
        edits.append(("  advantage:", "  old: {op: logprob, engine: actor, write: old_logprob}\n  advantage:"))
    project.assert_problem(project.pipeline(*edits), place, fragment)


def nodes_of(base: str) -> str:
    """The lines of the pipeline that declare its nodes."""
    return base[base.index("  rollout: {op") : base.index("run: {steps")]


def test_remax_compares_with_a_greedy_rollout(project, base):
    check_file(project.pipeline((nodes_of(base), GREEDY)))


def test_the_baseline_is_not_sampled_in_validation(project, base):
    checked = check_file(project.pipeline((nodes_of(base), GREEDY)))
    assert set(checked.graph.validation.nodes) == {"prompts", "rollout", "reward", "samples"}


def test_remax_needs_no_group(project, base):
    check_file(project.pipeline((nodes_of(base), GREEDY.replace("n: 4", "n: 1"))))


def test_a_response_is_not_its_own_baseline(project, base):
    wrong = GREEDY.replace("read_from: [greedy]", "read_from: [rollout]").replace("remax}", "remax} #!")
    fragments = "baseline-of-same-samples"
    project.assert_problem(project.pipeline((nodes_of(base), wrong)), "nodes.advantage", fragments)


def test_a_greedy_rollout_is_not_trained_on(project, base):
    wrong = GREEDY.replace("update: {op: update, read_from: [rollout]", "update: {op: update, read_from: [greedy]")
    wrong = wrong.replace("temperature: 0}}", "temperature: 0}} #!")
    path = project.pipeline((nodes_of(base), wrong))
    project.assert_problem(path, "nodes.greedy.sampling.temperature", "greedy-samples")


@pytest.mark.parametrize("estimator", ["remax", "reinforce_plus_plus"])
def test_points_for_being_shorter_need_a_group(project, base, estimator):
    nodes = GREEDY.replace("n: 4", "n: 1")
    nodes = nodes.replace("estimator: remax", f"estimator: {estimator}, length_reward: {{}}")
    if estimator != "remax":
        nodes = nodes.replace("write: baseline_reward", "write: spare")
    path = project.pipeline((nodes_of(base), nodes))
    messages = [problem.message for problem in project.problems(path)]
    assert messages == [
        "`advantage` compares the responses to a prompt (length_reward), and there is only 1; set `n: 2` or more"
    ]


def test_losses_without_a_ratio_take_several_steps_without_old_log_probs(project):
    project.write("own_checks.py", OWN)
    for policy in ("opmd", "'own_checks:unclipped'"):
        check_file(project.pipeline((UPDATE, f"loss: {{policy: {policy}, kl_coef: 0.01}}, epochs: 2}}")))


M2PO = [
    "nodes.old={op: logprob, engine: actor, write: old_logprob}",
    "nodes.marks={op: covariance, second_moment: 0.04}",
    "nodes.update.loss.policy=m2po",
    "nodes.update.read={old_logprob: rollout_logprob}",
]


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ([], []),
        (["nodes.update.read={}"], ["ratio-to-the-trainer"]),
        (["nodes.update.mini_batch=4"], ["marks-of-another-step"]),
        (["nodes.update.epochs=2"], ["marks-of-another-step"]),
    ],
)
def test_marks_that_m2po_does_not_mean_are_a_warning(project, overrides, codes):
    assert [warning.code for warning in check_file(project.folder / "p.yaml", [*M2PO, *overrides]).warnings] == codes


def test_m2po_needs_the_marks_of_a_second_moment(project):
    (problem,) = project.problems(project.folder / "p.yaml", *M2PO, "nodes.marks={op: covariance}")
    assert problem.code == "marks-of-another-loss"


@pytest.mark.parametrize(
    ("policy", "marks"),
    [
        ("kl_cov", "top_entropy: 0.2"),
        ("kl_cov", "second_moment: 0.04"),
        ("clip_cov", "second_moment: 0.04"),
        ("m2po", "top_entropy: 0.2"),
    ],
)
def test_a_loss_needs_its_own_marks(project, policy, marks):
    old = "nodes.old={op: logprob, engine: actor, statistics: [entropy], write: {logprob: old_logprob}}"
    overrides = [old, f"nodes.marks={{op: covariance, {marks}}}", f"nodes.update.loss.policy={policy}"]
    (problem,) = project.problems(project.folder / "p.yaml", *overrides)
    assert problem.code == "marks-of-another-loss"


def test_an_unbiased_divergence_needs_the_old_log_probs(project):
    loss = "loss: {policy: none, kl_coef: 0.1, kl_estimator: 'k3*'}, mini_batch: 4}"
    assert "missing-old-logprob" in [each.code for each in project.problems(project.pipeline((UPDATE, loss)))]


@pytest.mark.parametrize("read", ["{}", "{old_logprob: rollout_logprob}"])
def test_vespo_takes_no_weight_beside_its_own(project, read):
    overrides = [M2PO[0], f"nodes.update.read={read}", "nodes.update.loss.policy=vespo"]
    path = project.folder / "p.yaml"
    check_file(path, [*overrides, "nodes.update.rollout_correction={rollout_rs: token_tv, rollout_rs_threshold: 0.1}"])
    (problem,) = project.problems(path, *overrides, "nodes.update.rollout_correction={rollout_is: token}")
    assert problem.code == "ratio-counted-twice"


@pytest.mark.parametrize("names", [("right", "polite"), ("reward", "polite")])
def test_gdpo_needs_rewards_of_its_own_names_alone(project, names):
    project.write("own_checks.py", "def polite(**sample): return 1.0\n")
    edits = [
        ("  reward: {op: reward, fn: exact}", f"  reward: {{op: reward, fn: exact, write: {names[0]}}}"),
        ("  advantage:", f"  polite: {{op: reward, fn: 'own_checks:polite', write: {names[1]}}}\n  advantage:"),
        ("grpo}", f"gdpo, rewards: {{{names[0]}: 1.0, {names[1]}: 0.5}}}}"),
    ]
    assert check_file(project.pipeline(*edits)).warnings == ()


def test_pass_at_k_needs_k_responses(project):
    for_four = project.pipeline(("grpo}", "passk, k: 4}"))
    check_file(for_four)
    (problem,) = project.problems(for_four, "nodes.advantage.k=5")
    assert (problem.place, problem.code) == ("nodes.rollout.n", "group-too-small")
    check_file(for_four, ["nodes.advantage.k=5", "nodes.rollout.n=5"])


def test_baselines_of_roles_are_not_repeated_in_rounds(project):
    project.write("own_checks.py", "def telling(advantage): return bool((advantage != 0).any())\n")
    keep = ("  update:", "  keep: {op: filter, fn: 'own_checks:telling'}\n  update:")
    check_file(project.pipeline(keep))
    path = project.pipeline(keep, ("grpo}", "rae} #!"))
    project.assert_problem(path, "nodes.advantage.estimator", "state-in-rounds")


@pytest.mark.parametrize("loss", ["off_policy_delta: 0.1", "kl_estimator: 'k3*', kl_coef: 0.1"])
@pytest.mark.parametrize("policy", ["reinforce", "opmd"])
def test_the_ratio_of_masks_and_divergences_needs_the_old_log_probs(project, loss, policy):
    overrides = [f"nodes.update.loss={{policy: {policy}, {loss}}}", "nodes.update.mini_batch=4"]
    (problem,) = project.problems(project.folder / "p.yaml", *overrides)
    assert problem.code == "missing-old-logprob"
    check_file(project.folder / "p.yaml", [M2PO[0], *overrides])


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ([], ["mask-without-effect"]),
        (["nodes.update.read={old_logprob: rollout_logprob}"], []),
        (["nodes.update.epochs=2", M2PO[0]], []),
    ],
)
def test_a_mask_by_a_ratio_that_is_always_1_is_a_warning(project, overrides, codes):
    found = check_file(project.folder / "p.yaml", ["nodes.update.loss={off_policy_delta: 0.1}", *overrides])
    assert [warning.code for warning in found.warnings] == codes
