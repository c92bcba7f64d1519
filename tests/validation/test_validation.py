"""Validation sets, responses to each prompt, answers that are counted, and the metric of the best checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dagrl.validation import check_file
from dagrl.validation.summary import summarize

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"
VAL = ("  train: train.parquet", "  train: train.parquet\n  val: train.parquet")
SETS = ("  train: train.parquet", "  train: train.parquet\n  val: {sums: train.parquet, more: more.parquet}")
SAMPLING = "sampling: {max_new_tokens: 8}}"


def rollout(extra: str) -> tuple[str, str]:
    return SAMPLING, f"sampling: {{max_new_tokens: 8}}, {extra}}}"


def run(extra: str) -> tuple[str, str]:
    return "run: {steps: 10}", f"run: {{steps: 10, validate_every: 5, {extra}}}"


def test_validation_without_prompts(project):
    path = project.pipeline(("run: {steps: 10}", "run: {steps: 10, validate_every: 5} #!"))
    project.assert_problem(path, "run.validate_every", "missing-validation-set")


@pytest.mark.parametrize(
    ("keys", "place", "code"),
    [
        ("steps: 0", "run.steps", "no-steps"),
        ("steps: 0, validate_every: 1", "run.steps", "no-steps"),
        ("steps: 10, val_only: true", "run.val_only", "missing-validation-set"),
        ("steps: 0, val_only: best", "run.val_only", "missing-validation-set"),
        ("steps: 0, validate_first: true", "run.validate_first", "missing-validation-set"),
    ],
)
def test_a_validation_alone_needs_something_to_validate(project, keys, place, code):
    project.assert_problem(project.pipeline(("run: {steps: 10}", f"run: {{{keys}}} #!")), place, code)


@pytest.mark.parametrize(
    "keys", ["steps: 0, validate_first: true", "steps: 1, val_only: true, validate_every: 5", "steps: 9, val_only: 3"]
)
def test_rules_of_training_are_not_those_of_a_validation_alone(project, keys):
    path = project.pipeline(VAL, ("run: {steps: 10}", f"run: {{{keys}, keep_best: {{metric: val/mean@1}}}}"))
    path.write_text(path.read_text() + "\nprofile: {steps: [7]}\n")
    assert check_file(path).warnings == ()


def test_several_sets_are_files_of_their_own(project, row):
    project.write_rows("more.parquet", [row] * 3)
    checked = check_file(project.pipeline(SETS, run("save_every: 5")))
    assert checked.rows == {"train": 32, "val.sums": 32, "val.more": 3}
    assert checked.loaded.pipeline.data.val == {
        "sums": project.folder / "train.parquet",
        "more": project.folder / "more.parquet",
    }
    assert "val.more" in summarize(checked)


def test_a_set_whose_file_is_missing_is_named(project):
    path = project.pipeline((SETS[0], SETS[1] + " #!"))
    project.assert_problem(path, "data.val.more", "wrong-data-file")


@pytest.mark.parametrize(
    ("sets", "place", "fragment"),
    [
        ("{}", "data.val", "invalid-value"),
        ("{AIME: a.parquet}", "data.val.AIME", "invalid-name"),
        ("{aime: 3}", "data.val.aime", "invalid-value"),
        ("[]", "data.val", "invalid-value"),
    ],
)
def test_sets_that_are_none(project, sets, place, fragment):
    path = project.pipeline((VAL[0], f"{VAL[0]}\n  val: {sets} #!"))
    project.assert_problem(path, place, fragment)


def test_several_responses_need_a_temperature(project):
    path = project.pipeline(VAL, (SAMPLING, rollout("val_n: 4")[1] + " #!"))
    message = "greedy-samples"
    project.assert_problem(path, "nodes.rollout.val_n", message)
    cold = rollout("val_n: 4, val_sampling: {max_new_tokens: 8, temperature: 0}")[1]
    project.assert_problem(project.pipeline(VAL, (SAMPLING, cold + " #!")), "nodes.rollout.val_n", message)
    check_file(project.pipeline(VAL, rollout("val_n: 4, val_sampling: {max_new_tokens: 8}")))


@pytest.mark.parametrize(
    ("vote", "fragment"),
    [
        (
            "maths",
            "invalid-vote",
        ),
        ("no_such_votes:vote", "invalid-vote"),
        ("votes:pair", "invalid-vote"),
    ],
)
def test_votes_that_cannot_be_counted(project, vote, fragment):
    project.write("votes.py", "def pair(response, other): ...\ndef one(response): ...\n")
    path = project.pipeline((VAL[0], f"{VAL[1]}\n  val_vote: {vote} #!"))
    project.assert_problem(path, "data.val_vote", fragment)
    check_file(project.pipeline((VAL[0], f"{VAL[1]}\n  val_vote: votes:one")))


def best(metric: str, more: str = "save_every: 5") -> tuple[str, str]:
    old, new = run(f"{more}, keep_best: {{metric: {metric}}}")
    return old, f"{new} #!"


@pytest.mark.parametrize(
    ("metric", "fragment"),
    [
        ("val/mean@4", "`val/mean@1`"),
        ("val/maj@2", "unknown-metric"),
        ("val/sums/pass@2", "unknown-metric"),
    ],
)
def test_a_metric_that_no_validation_has(project, metric, fragment):
    project.assert_problem(project.pipeline(VAL, best(metric)), "run.keep_best.metric", fragment)


@pytest.mark.parametrize(
    ("conditions", "place", "fragment"),
    [
        ("warn_when: [grad_norm >> 1]", "run.warn_when[0]", "is not a condition; write `grad_norm > 100`"),
        ("stop_when: [entropy < 0, val/mean@4 < 0.1 for 2]", "run.stop_when[1]", "did you mean `val/mean@1`?"),
    ],
)
def test_alarms_that_can_never_be_raised(project, conditions, place, fragment):
    old, new = run(conditions)
    project.assert_problem(project.pipeline(VAL, (old, f"{new} #!")), place, fragment)
    unmeasured = project.pipeline((old, "run: {steps: 10, warn_when: [val/mean@1 < 1]} #!"))
    project.assert_problem(unmeasured, "run.warn_when[0]", "nothing measures `val/mean@1`")


def test_several_sets_have_metrics_of_their_own(project, row):
    project.write_rows("more.parquet", [row])
    message = "unknown-metric"
    project.assert_problem(project.pipeline(SETS, best("val/mean@1")), "run.keep_best.metric", message)
    project.assert_problem(project.pipeline(SETS, best("val/more/mean@2")), "run.keep_best.metric", "`val/more/mean@1`")
    form = (
        "  reward: {op: reward, fn: exact}",
        "  reward: {op: reward, fn: exact}\n  form: {op: reward, fn: math, write: form}",
    )
    told = ("val/reward/mean", "val/reward/form", "val/more/response_tokens/max", "val/data/dropped_prompts")
    for metric in ("val/more/mean@1", "val/more/source/mean@1", "reward/mean", *told):
        check_file(project.pipeline(SETS, form, best(metric)))


def test_the_best_has_to_be_saved_and_measured(project):
    message = "unmeasured-metric"
    edit = ("run: {steps: 10}", "run: {steps: 10, validate_every: 3, keep_best: {}} #!")
    project.assert_problem(project.pipeline(VAL, edit), "run.keep_best", message)
    edit = ("run: {steps: 10}", "run: {steps: 10, validate_every: 3, save_every: 4, keep_best: {}} #!")
    project.assert_problem(project.pipeline(VAL, edit), "run.keep_best", message)
    edit = ("run: {steps: 10}", "run: {steps: 10, save_every: 4, keep_best: {}} #!")
    project.assert_problem(project.pipeline(VAL, edit), "run.keep_best.metric", "unmeasured-metric")
    for right in ("validate_every: 5", "validate_every: 3, save_every: 2", "validate_every: 2, save_every: 6"):
        check_file(project.pipeline(VAL, ("run: {steps: 10}", f"run: {{steps: 10, {right}, keep_best: {{}}}}")))


OFFLINE = """\
extends: p.yaml
data: {val: train.parquet, responses: [response], max_response_tokens: 8}
nodes: {rollout: null, reward: null, ref: null, advantage: null, update: null, sft: {op: sft, engine: actor}}
engines: {reference: null, generator: null}
run: {steps: 4, save_every: 2, keep_best: {metric: val/loss/sft, mode: min}}
"""


def test_training_on_given_responses_has_a_best_checkpoint_too(project, row):
    project.write_rows("train.parquet", [{**row, "response": "2"}] * 32)
    path = project.write("offline.yaml", OFFLINE)
    check_file(path, ["run.validate_every=2"])
    assert "`val/loss/sft` is never measured; set `run.validate_every`" in project.only_problem(path).message


def test_examples_of_the_docs_are_right(project, row):
    yaml_block, own_block, _, python_block = re.findall(
        r"```(?:yaml|python)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    for name in ("gsm8k/train", "gsm8k/test", "aime/test"):
        (project.folder / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        project.write_rows(f"data/{name}.parquet", [row] * 32)
    checked = check_file(project.write("docs.yaml", "extends: p.yaml\n" + yaml_block), ["run.steps=20"])
    assert checked.rows == {"train": 32, "val.gsm8k": 32, "val.aime": 32}
    own = project.write("own.yaml", f"extends: docs.yaml\nrun: {{keep_best: null}}\n{own_block}")
    assert check_file(own, ["run.steps=20"]).loaded.pipeline.val_ns == {"gsm8k": 16, "aime": 32}
    scope: dict = {}
    exec(compile(python_block, "my_votes.py", "exec"), scope)
    assert scope["choice"]("It is B or rather C") == "C"
    assert scope["choice"]("no idea") is None


def test_scorers_have_room_for_the_longest_validation_responses(project):
    judge = "ref: {op: logprob, engine: reference, write: ref_logprob, tokens_per_micro_batch: 24}"
    longer = rollout("val_sampling: {max_new_tokens: 9}")
    # Log-probs are not computed in validation.
    path = project.pipeline(
        VAL, longer, ("ref: {op: logprob, engine: reference, write: ref_logprob}", judge), run("save_every: 5")
    )
    check_file(path)
    own = '@dagrl.node(reads=["ref_logprob"], writes=["reward"])\ndef kind(batch):\n    return {}\n'
    project.write("kind_nodes.py", "import dagrl\n\n\n" + own)
    path = project.pipeline(
        VAL,
        longer,
        ("ref: {op: logprob, engine: reference, write: ref_logprob}", judge + " #!"),
        ("reward: {op: reward, fn: exact}", 'reward: {op: "kind_nodes:kind"}'),
        run("save_every: 5"),
    )
    message = "micro-batch-too-small"
    project.assert_problem(path, "nodes.ref.tokens_per_micro_batch", message)


HOT = "sampling: {max_new_tokens: 8, temperature: 0.5}"


def sets(extra: str) -> tuple[str, str]:
    return VAL[0], f"{VAL[0]}\n  val: {{sums: train.parquet, more: {{path: train.parquet, {extra}}}}}"


@pytest.mark.parametrize("extra", ["n: 1", HOT, f"n: 4, {HOT}", "n: 1, sampling: {max_new_tokens: 2}"])
def test_a_set_has_sampling_of_its_own(project, extra):
    checked = check_file(project.pipeline(sets(extra), run("save_every: 5")))
    assert checked.warnings == ()
    assert checked.rows == {"train": 32, "val.sums": 32, "val.more": 32}
    reads = checked.graph.nodes["rollout"].inputs
    assert ("data_set" in reads) == ("sampling" in extra)


@pytest.mark.parametrize(
    ("extra", "place", "code"),
    [
        ("n: 4", "data.val.more.n", "greedy-samples"),
        ("n: 4, sampling: {max_new_tokens: 8, temperature: 0}", "data.val.more.n", "greedy-samples"),
        ("n: 0", "data.val.more.n", "invalid-value"),
        ("m: 4", "data.val.more.m", "unknown-key"),
        ("sampling: {temperature: 1}", "data.val.more.sampling.max_new_tokens", "missing-key"),
    ],
)
def test_sampling_of_a_set_that_is_wrong(project, extra, place, code):
    old, new = sets(extra)
    problem = project.only_problem(project.pipeline((old, f"{new} #!"), run("save_every: 5")))
    assert problem.place.startswith(place.partition("[")[0])
    assert code in problem.code


def test_the_best_metric_is_one_of_the_sets_own_number_of_responses(project):
    best = "save_every: 5, keep_best: {metric: val/%s}"
    for metric in ("more/pass@4", "sums/pass@1", "more/sums/mean@4"):
        check_file(project.pipeline(sets(f"n: 4, {HOT}"), run(best % metric)))
    for metric in ("sums/pass@4", "more/mean@1", "mean@4"):
        problem = project.only_problem(project.pipeline(sets(f"n: 4, {HOT}"), run(best % metric)))
        assert problem.code == "unknown-metric"
