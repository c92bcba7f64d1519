import pytest

from dagrl.validation import check_file

UPDATE = "loss: {kl_coef: 0.01}}"
SAMPLING = "sampling: {max_new_tokens: 8}}"
CASES = {
    "reward": ("fn: exact}", "fn: exakt} #!", "nodes.reward.fn", "unknown-reward", "did you mean `exact`?"),
    "reward module": (
        "fn: exact}",
        "fn: 'gone:f'} #!",
        "nodes.reward.fn",
        "invalid-reward",
    ),
    "expression of a reward": (
        "fn: exact}",
        'fn: exact, args: {extract: "("}} #!',
        "nodes.reward.args.extract",
        "invalid-reward",
        "extract is not a regular expression: '(': missing ), unterminated subpattern",
    ),
    "switch of a reward": (
        "fn: exact}",
        "fn: exact, args: {ignore_case: 'no'}} #!",
        "nodes.reward.args.ignore_case",
        "invalid-reward",
        "must be true or false",
    ),
    "limit of a reward": (
        "fn: exact}",
        "fn: code, args: {timeout_s: 0}} #!",
        "nodes.reward.args.timeout_s",
        "invalid-reward",
        "must be greater than 0",
    ),
    "temperature": (
        SAMPLING,
        "sampling: {max_new_tokens: 8, temperature: 0}} #!",
        "nodes.rollout.sampling.temperature",
        "greedy-samples",
    ),
    "top_k": (
        SAMPLING,
        "sampling: {max_new_tokens: 8, top_k: 0}} #!",
        "nodes.rollout.sampling.top_k",
        "invalid-value",
    ),
    "one response": (
        f"n: 4, {SAMPLING}",
        f"n: 1, {SAMPLING} #!",
        "nodes.rollout.n",
        "group-too-small",
    ),
    "deviation": (
        "estimator: grpo}",
        "estimator: rloo, normalize_by_std: false} #!",
        "nodes.advantage.normalize_by_std",
        "option-without-effect",
    ),
    "overlong buffer": (
        "estimator: grpo}",
        "estimator: grpo, overlong_buffer: {len: 9}} #!",
        "nodes.advantage.overlong_buffer.len",
        "buffer-too-long",
    ),
    "dual clip of another loss": (
        UPDATE,
        "loss: {policy: cispo, dual_clip: 3.0}} #!",
        "nodes.update.loss.dual_clip",
        "option-without-effect",
    ),
    "drift of another loss": (
        UPDATE,
        "loss: {drift_coef: 0.01}} #!",
        "nodes.update.loss.drift_coef",
        "option-without-effect",
    ),
    "clip of a loss without": (
        UPDATE,
        "loss: {policy: reinforce, clip_ratio_high: 0.3}} #!",
        "nodes.update.loss.clip_ratio_high",
        "option-without-effect",
    ),
    "mini-batch too large": (
        UPDATE,
        "loss: {kl_coef: 0.01}, mini_batch: 16} #!",
        "nodes.update.mini_batch",
        "mini-batch-too-large",
    ),
    "micro-batch": (
        UPDATE,
        "loss: {kl_coef: 0.01}, tokens_per_micro_batch: 23} #!",
        "nodes.update.tokens_per_micro_batch",
        "micro-batch-too-small",
    ),
    "micro-batch of log-probs": (
        "write: ref_logprob}",
        "write: ref_logprob, tokens_per_micro_batch: 8} #!",
        "nodes.ref.tokens_per_micro_batch",
        "micro-batch-too-small",
    ),
    "epochs": (
        UPDATE,
        "loss: {kl_coef: 0.01}, epochs: 2} #!",
        "nodes.update.epochs",
        "missing-old-logprob",
    ),
    "several steps": (
        UPDATE,
        "loss: {kl_coef: 0.01}, mini_batch: 4} #!",
        "nodes.update.mini_batch",
        "2 optimizer steps on one batch need the log-probs",
    ),
    "shards": (
        "run: {steps: 10}",
        "run: {steps: 10}\nschedule: {shards_per_step: 9} #!",
        "schedule.shards_per_step",
        "too-many-shards",
    ),
    "nothing to validate on": (
        "run: {steps: 10}",
        "run: {steps: 10, validate_first: true} #!",
        "run.validate_first",
        "missing-validation-set",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_errors_of_nodes_and_sizes_are_reported(project, case):
    old, new, place, *fragments = case
    project.assert_problem(project.pipeline((old, new)), place, *fragments)


@pytest.mark.parametrize(
    "override",
    [
        "nodes.rollout.n=2",
        "nodes.advantage.overlong_buffer={len: 8}",
        "nodes.update.tokens_per_micro_batch=24",
        "nodes.update.mini_batch=8",
        "data.prompts_per_step=32",
    ],
)
def test_minimal_sizes_pass(project, override):
    assert check_file(project.folder / "p.yaml", [override]).warnings == ()


OWN = """
import dagrl
def score(response, scale): return 1.0
@dagrl.reward(batched=True)
def together(response): return [1.0]
@dagrl.node(reads=["reward"], writes=["bonus"])
def bonus(batch, weight): return {}
@dagrl.node(reads=[], writes=["clock"])
def clock(batch): return {}
"""


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("nodes.reward={op: reward, fn: 'own_args:score'}", "wants 'scale', which is none of prompt"),
        ("nodes.reward={op: reward, fn: 'own_args:score', args: {scale: 1, scal: 2}}", "has no parameter 'scal'"),
        ("nodes.reward={op: reward, fn: code, args: {continous: true}}", "has no parameter 'continous'"),
        ("nodes.reward={op: reward, fn: 'own_args:together', concurrency: 2}", "scores all samples of a shard"),
        ("nodes.mine={op: 'own_args:bonus'}", "missing a required argument: 'weight'; it gets the batch"),
        ("nodes.mine={op: 'own_args:bonus', args: {weight: 1, w: 2}}", "got an unexpected keyword argument 'w'"),
        ("nodes.mine={op: 'own_args:clock'}", "reads no column, so it has no rows to work on"),
    ],
)
def test_own_functions_that_cannot_be_called_are_reported(project, override, fragment):
    project.write("own_args.py", OWN)
    assert fragment in project.only_problem(project.folder / "p.yaml", override).message


@pytest.mark.parametrize("name", ["prompts", "samples", "step", "sync", "save"])
def test_names_in_use_are_reported(project, name):
    place = "  reward: {op: reward, fn: exact}"
    path = project.pipeline((place, f"{place}\n  {name}: {{op: reward, fn: exact, write: {{reward: more}}}}"))
    told = {problem.place: problem.message for problem in project.problems(path)}
    assert told[f"nodes.{name}"].startswith(f"`{name}` is the name of a ")


def test_mini_batches_that_do_not_divide_the_step(project):
    path = project.pipeline((UPDATE, "loss: {kl_coef: 0.01}, mini_batch: 3}"))
    (problem,) = [problem for problem in project.problems(path) if problem.code == "uneven-mini-batches"]
    assert problem.place == "nodes.update.mini_batch"


def test_a_misspelt_size_has_no_further_problem(project):
    path = project.pipeline(
        ("prompts_per_step: 8", "promts_per_step: 8 #!"), (UPDATE, "loss: {kl_coef: 0.01}, mini_batch: 8}")
    )
    project.assert_problem(path, "data.promts_per_step", "unknown-key")


def test_several_steps_with_old_logprobs_pass(project):
    check_file(
        project.folder / "p.yaml",
        ["nodes.old={op: logprob, engine: actor, write: old_logprob}", "nodes.update.mini_batch=4"],
    )


def test_rows_are_padded_for_the_layout_before_they_fill_a_micro_batch(project):
    # 16 + 8 = 24 tokens; two chunks on each of 2 context-parallel ranks, each shared by 4 sequence-parallel ones.
    layout = "{tensor_model_parallel_size: 4, context_parallel_size: 2, sequence_parallel: true}"
    overrides = [
        "groups.train={gpus_per_node: 8}",
        "model.init.num_key_value_heads=4",
        f"engines.actor.parallel={layout}",
        "nodes.update.tokens_per_micro_batch=32",
    ]
    path = project.folder / "p.yaml"
    check_file(path, [*overrides, "nodes.ref.tokens_per_micro_batch=32"])
    # The reference lives on the actor's ranks, and so in its layout.
    (problem,) = project.problems(path, *overrides, "nodes.ref.tokens_per_micro_batch=31")
    assert problem.code == "micro-batch-too-small"
    for part in ("nodes.rollout.sampling.max_new_tokens", "padded to 32", "layout of `actor`", "set it to 32"):
        assert part in problem.message


def test_samples_longer_than_the_models_positions_are_a_warning(project):
    path = project.pipeline(("hidden_size: 64", "hidden_size: 64, max_position_embeddings: 23"))
    (warning,) = check_file(path).warnings
    assert (warning.place, warning.code) == ("nodes.rollout.sampling.max_new_tokens", "sample-too-long")
    assert "24 tokens, more than the model's max_position_embeddings, 23" in warning.message
    assert check_file(path, ["model.init.max_position_embeddings=24"]).warnings == ()


def test_a_reward_of_ones_own_passes(project):
    project.write("own_reward.py", "def score(**sample): return 1.0\n")
    check_file(project.folder / "p.yaml", ["nodes.reward.fn=own_reward:score"])


def test_fewer_prompts_than_the_default_number_of_shards_pass(project):
    check_file(project.folder / "p.yaml", ["data.prompts_per_step=2"])


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({}, []),
        ({"policy": "gspo"}, ["clip-ratio-of-gspo"]),
        ({"policy": "gspo", "clip_ratio": "3.0e-4", "clip_ratio_high": "4.0e-4"}, []),
        ({"policy": "reinforce"}, []),
        ({"policy": "cpgd", "drift_coef": "0.01", "clip_ratio": "0.1"}, []),
    ],
)
def test_losses_that_are_not_what_their_papers_mean_are_a_warning(project, options, codes):
    overrides = [f"nodes.update.loss.{name}={value}" for name, value in options.items()]
    warnings = check_file(project.folder / "p.yaml", overrides).warnings
    assert [warning.code for warning in warnings] == codes


@pytest.mark.parametrize("override", ["nodes.update.mini_batch=4", "nodes.update.epochs=2"])
def test_several_steps_without_a_ratio_are_a_warning(project, override):
    old = "nodes.old={op: logprob, engine: actor, write: old_logprob}"
    (warning,) = check_file(project.folder / "p.yaml", ["nodes.update.loss.policy=reinforce", old, override]).warnings
    assert warning.code == "off-policy-reinforce"


def test_reinforce_plus_plus_needs_no_group(project):
    overrides = ["nodes.advantage.estimator=reinforce_plus_plus", "nodes.rollout.n=1"]
    check_file(project.folder / "p.yaml", overrides)
    for estimator in ("dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"):
        named = f"nodes.advantage.estimator={estimator}"
        assert f"({estimator})" in project.only_problem(project.folder / "p.yaml", named, overrides[1]).message


def test_a_reference_that_is_trained_itself_is_odd(project):
    checked = check_file(project.pipeline(("op: logprob, engine: reference", "op: logprob, engine: actor")))
    told = {warning.place: warning.message for warning in checked.warnings}
    assert "the reference moves with the policy" in told["nodes.ref.engine"]
    assert "name an engine with `frozen_copy_of: actor`" in told["nodes.ref.engine"]


def test_a_mini_batch_that_does_not_divide_is_one_problem(project):
    path = project.pipeline(("kl_coef: 0.01}", "kl_coef: 0.01}, mini_batch: 3 #!\n   "))
    project.assert_problem(path, "nodes.update.mini_batch", "uneven-mini-batches")


def test_a_class_is_no_reward(project):
    project.write("own.py", "class Judge:\n    pass\n")
    path = project.pipeline(("fn: exact}", "fn: 'own:Judge'} #!"))
    project.assert_problem(path, "nodes.reward.fn", "invalid-reward")
