"""What `dagrl validate` says of teachers and students."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

TEACHER = """  teacher: {op: logprob, engine: reference, write: teacher_logprob}
"""
DISTILLED = "estimator: none, distillation: {}, read: {old_logprob: rollout_logprob}}"
ADVANTAGE = ("  advantage: {op: advantage, estimator: grpo}", f"{TEACHER}  advantage: {{op: advantage, {DISTILLED}")
ALONE = ("loss: {kl_coef: 0.01}}", "loss: {policy: none, distillation: {}}}")
OVER_TOKENS = ("loss: {kl_coef: 0.01}}", "loss: {policy: none, distillation: {divergence: jsd, is_clip: 2}}}")
WITHOUT_REWARD = ("  reward: {op: reward, fn: exact}\n", "")
REF = ("  ref: {op: logprob, engine: reference, write: ref_logprob}\n", "")
NO_ADVANTAGE = ("  advantage: {op: advantage, estimator: grpo}", TEACHER.rstrip())
TOP_K = ("write: teacher_logprob", "write: teacher_logprob, top_k: 4")
WHOLE = (
    ("engine: reference, write: teacher_logprob", "engine: other, write: teacher_logprob, hidden_states: true"),
    ("loss: {kl_coef: 0.01}}", "loss: {policy: none, distillation: {divergence: jsd, over: vocabulary}}}"),
)
STUDENTS = (
    TEACHER.rstrip(),
    """  student: {op: logprob, engine: actor, top_k: 4, write: student_logprob}
  teacher: {op: logprob, engine: reference, candidates: student_topk_ids, write: teacher_logprob}""",
)
AT_END = ("write: teacher_logprob}", "write: teacher_logprob} #!")
TWO = """  maths: {op: logprob, engine: reference, rows: {data_set: [train]}, write: maths_logprob}
  code: {op: logprob, engine: reference, rows: 'choices:is_code', write: code_logprob}
"""
OLD = "  old: {{op: logprob, engine: {}, write: old_logprob}}\n"
GENERATOR = "  generator: {backend"
SMALL = "model: {init: {model_type: qwen3, hidden_size: 32}}"
OTHER = (GENERATOR, f"  other: {{backend: megatron, group: train, {SMALL}}}\n{GENERATOR}")
MERGED = "  merged: {op: merge, columns: [maths_logprob, code_logprob]}\n"
BEFORE = ("  advantage:", f"{TEACHER}  old: {{op: logprob, engine: actor, write: old_logprob}}\n  advantage:")
CHOICES = """
def is_code(data_source): return [name == "code" for name in data_source]
def nothing(): return []
"""


@pytest.mark.parametrize(
    "edits",
    [
        [ADVANTAGE],
        [ADVANTAGE, WITHOUT_REWARD],
        [ADVANTAGE, ("estimator: none", "estimator: grpo")],
        [ADVANTAGE, ("estimator: none", "estimator: reinforce_plus_plus")],
        [NO_ADVANTAGE, ALONE, REF],
        [NO_ADVANTAGE, ALONE, REF, WITHOUT_REWARD],
        [NO_ADVANTAGE, TOP_K, OVER_TOKENS, REF],
        [NO_ADVANTAGE, STUDENTS, OVER_TOKENS, REF],
        [NO_ADVANTAGE, OTHER, *WHOLE, REF, ("  reference: {backend: megatron, frozen_copy_of: actor}\n", "")],
        [ADVANTAGE, (TEACHER, TWO + MERGED)],
        [ADVANTAGE, (TEACHER, TWO + MERGED.replace("]}", "], uncovered: skip}"))],
    ],
)
def test_a_student_of_teachers_is_a_pipeline(project, edits) -> None:
    project.write("choices.py", CHOICES)
    checked = check_file(project.pipeline(*edits))
    assert checked.warnings == ()
    graph = checked.graph
    rewarded = "reward" in graph.nodes
    assert ("reward" in graph.nodes["samples"].inputs) == rewarded
    assert ("reward" in graph.validation.nodes) == rewarded


@pytest.mark.parametrize(
    ("edits", "place", "code"),
    [
        ([("grpo}", "none} #!")], "nodes.advantage.estimator", "nothing-to-learn"),
        ([("{kl_coef: 0.01}}", "{policy: none}} #!")], "nodes.update.loss.policy", "nothing-to-learn"),
        ([("grpo}", "grpo, distillation: {}, read: {old_logprob: rollout_logprob}} #!")], "nodes.advantage", "teacher"),
        ([("{kl_coef: 0.01}}", "{distillation: {}}} #!")], "nodes.update", "missing-column"),
        *(
            (
                [
                    NO_ADVANTAGE,
                    TOP_K,
                    ("loss: {kl_coef: 0.01}}", f"loss: {{policy: none, distillation: {given}}}}} #!"),
                ],
                f"nodes.update.loss.distillation.{key}",
                code,
            )
            for given, key, code in [
                ("{divergence: forward_kl, alpha: 0.2}", "alpha", "option-without-effect"),
                ("{outside: bucket}", "outside", "option-without-effect"),
                ("{min_logprob: -10}", "min_logprob", "option-without-effect"),
                ("{divergence: jsd, outside: zero}", "outside", "infinite-divergence"),
            ]
        ),
        *(
            (
                [NO_ADVANTAGE, STUDENTS, OVER_TOKENS, ("candidates: student_topk_ids", f"candidates: {given}"), AT_END],
                "nodes.teacher.candidates",
                "wrong-column-kind",
            )
            for given in ("response_tokens", "student_topk_logprob", "data_source", "policy_version", "prompt_tokens")
        ),
        *(
            ([NO_ADVANTAGE, OTHER, *WHOLE, REF, *edits], place, code)
            for edits, place, code in [
                (
                    [
                        ("_size: 128}", "_size: 128, vocab_size: 88}"),
                        ("hidden_size: 32", "hidden_size: 32, vocab_size: 99"),
                        ("vocabulary}}}", "vocabulary}}} #!"),
                    ],
                    "nodes.update.loss.distillation.over",
                    "other-vocabulary",
                ),
                (
                    [("vocabulary}}}", "vocabulary, outside: ignore}}} #!")],
                    "nodes.update.loss.distillation.outside",
                    "option-without-effect",
                ),
                (
                    [("engine: other", "engine: reference"), ("_states: true}", "_states: true} #!")],
                    "nodes.teacher.hidden_states",
                    "teacher-without-folder",
                ),
                (
                    [
                        ("  teacher:", "  more: {op: logprob, engine: other, hidden_states: true}\n  teacher:"),
                        (
                            "write: teacher_logprob, hidden_states: true}",
                            "write: teacher_logprob, hidden_states: true} #!",
                        ),
                    ],
                    "nodes.teacher.hidden_states",
                    "several-teachers",
                ),
            ]
        ),
        (
            [
                NO_ADVANTAGE,
                STUDENTS,
                OVER_TOKENS,
                ("candidates:", "top_k: 3, candidates:"),
                AT_END,
            ],
            "nodes.teacher.top_k",
            "option-without-effect",
        ),
        (
            [NO_ADVANTAGE, REF, (ALONE[0], f"{ALONE[1][:-1]}, rollout_correction: {{rollout_is: token}}}} #!")],
            "nodes.update.rollout_correction.rollout_is",
            "option-without-effect",
        ),
        (
            [ADVANTAGE, (DISTILLED, f"overlong_buffer: {{len: 4}}, {DISTILLED} #!")],
            "nodes.advantage.overlong_buffer",
            "option-without-effect",
        ),
        (
            [ADVANTAGE, (TEACHER, TEACHER.replace("}\n", ", rows: {data_set: [train]}} #!\n"))],
            "nodes.teacher.rows",
            "rows-without-log-probs",
        ),
        (
            [ADVANTAGE, (TEACHER, TWO.replace("[train]", "[maths]") + MERGED), ("maths_logprob}", "maths_logprob} #!")],
            "nodes.maths.rows.data_set[0]",
            "unknown-source",
        ),
        (
            [
                ADVANTAGE,
                (TEACHER, TWO.replace("{data_set: [train]}", "{response_mask: [1]}") + MERGED),
                ("maths_logprob}", "maths_logprob} #!"),
            ],
            "nodes.maths.rows.response_mask",
            "wrong-column-kind",
        ),
        (
            [ADVANTAGE, (TEACHER, TWO.replace("is_code", "nothing") + MERGED), ("code_logprob}", "code_logprob} #!")],
            "nodes.code.rows",
            "invalid-rows",
        ),
        *(
            (
                [ADVANTAGE, (TEACHER, TWO.replace("write: code", "top_k: 4, write: code") + merged)],
                f"nodes.merged.columns[{index}]",
                "wrong-column-kind",
            )
            for index, merged in (
                (1, MERGED.replace("code_logprob]}", "code_topk_ids]} #!")),
                (1, MERGED.replace("code_logprob]}", "code_topk_logprob]} #!")),
                (1, MERGED.replace("code_logprob]}", "reward]} #!")),
                (0, MERGED.replace("maths_logprob, code_logprob]}", "answer]} #!")),
            )
        ),
        ([("grpo}", "none, distillation: {coef: 0}} #!"), BEFORE], "nodes.advantage.estimator", "nothing-to-learn"),
        (
            [ADVANTAGE, (TEACHER, TWO + MERGED.replace("code_", "chat_").replace("]}", "]} #!"))],
            "nodes.merged",
            "missing-column",
        ),
    ],
)
def test_what_a_student_cannot_learn_from_is_reported(project, edits, place, code) -> None:
    project.write("choices.py", CHOICES)
    project.assert_problem(project.pipeline(*edits), place, code)


def test_an_order_that_learns_from_rewards_needs_them(project) -> None:
    order = ("  train: train.parquet\n", "  train: train.parquet\n  order: {adaptive: {}} #!\n")
    project.assert_problem(project.pipeline(ADVANTAGE, WITHOUT_REWARD, order), "data.order", "missing-reward")


def test_a_student_is_not_its_own_teacher(project) -> None:
    (warning,) = project.warnings(ADVANTAGE, (TEACHER, TEACHER.replace("reference", "actor")))
    assert warning == ("nodes.teacher.engine", "teacher-is-student")


def test_naming_the_policys_own_prompt_makes_no_other_teacher(project) -> None:
    itself = "engine: actor, read: {prompt_tokens: prompt_tokens}"
    (warning,) = project.warnings(ADVANTAGE, (TEACHER, TEACHER.replace("engine: reference", itself)))
    assert warning == ("nodes.teacher.engine", "teacher-is-student")


@pytest.mark.parametrize(
    ("edits", "place", "code"),
    [
        ([ADVANTAGE, ("old_logprob: rollout_", "old_logprob: teacher_")], "nodes.advantage", "teacher-is-student"),
        ([ADVANTAGE, (TEACHER, TEACHER + OLD.format("other")), OTHER], "nodes.old.engine", "old-of-another-model"),
    ],
)
def test_what_teaches_nothing_is_named(project, edits, place, code) -> None:
    found = project.warnings(*edits)
    assert [(where, known) for where, known in found if code in known] == [(place, found[0][1])]
    assert len(found) == 1


@pytest.mark.parametrize(
    "edits",
    [
        [ADVANTAGE, (TEACHER, TEACHER + OLD.format("actor"))],
        [ADVANTAGE, (TEACHER, TEACHER + OLD.format("reference"))],
        [ADVANTAGE, TOP_K, ("run: {steps: 10}", "run: {steps: 10, record: [teacher]}")],
        [("estimator: grpo", "estimator: gdpo, rewards: {reward: 1}")],
    ],
)
def test_what_teaches_something_is_not_named(project, edits) -> None:
    assert project.warnings(*edits) == []


@pytest.mark.parametrize("divergence", ["k1", "forward"])
def test_only_divergences_with_a_gradient_are_known(project, divergence: str) -> None:
    edit = ("{kl_coef: 0.01}}", f"{{distillation: {{divergence: {divergence}}}}}}} #!")
    path = project.pipeline(edit)
    assert "k1+" in project.only_problem(path).message


def test_a_validation_without_a_reward_measures_nothing(project) -> None:
    val = ("  train: train.parquet\n", "  train: train.parquet\n  val: train.parquet\n")
    every = ("run: {steps: 10}", "run: {steps: 10, validate_every: 5}")
    assert project.warnings(ADVANTAGE, val, every) == []
    assert project.warnings(ADVANTAGE, val, every, WITHOUT_REWARD) == [("data.val", "validation-without-reward")]


MATHS = "  maths: {op: logprob, engine: reference, rows: {data_set: [train]}, top_k: 4, write: maths_logprob}\n"
TOLD = "  told: {op: tell, demonstration: answer, max_prompt_tokens: 24}\n"
READS_TOLD = "  teacher: {op: logprob, engine: reference, read: {prompt_tokens: teacher_prompt_tokens}, "
SKIP = "  merged: {op: merge, columns: [maths_logprob], uncovered: skip}\n"
CHOSEN = "  teacher: {op: logprob, engine: reference, rows: {data_set: [train]}, write: teacher_logprob} #!\n"
OF_REFERENCE = "  merged: {op: merge, columns: [maths_logprob], uncovered: skip, write: ref_logprob} #!\n"
IDS = "  ids: {op: merge, columns: [maths_topk_ids], uncovered: skip, write: teacher_topk_ids}\n"
PROBS = "  probs: {op: merge, columns: [maths_topk_logprob], uncovered: skip, write: teacher_topk_logprob}\n"
OWN_NAME = "write: {teacher_topk_ids: teacher_topk_ids, teacher_mask: mask_of_ids}"
OVER_MERGED = ("kl_coef: 0.01}}", "policy: none, distillation: {divergence: jsd}}, read_from: [ids]}")


@pytest.mark.parametrize(
    "nodes",
    [
        TOLD + READS_TOLD + "rows: {teacher_mask: [1]}, write: teacher_logprob}\n",
        TOLD + READS_TOLD + "rows: {teacher_mask: [1.0]}, write: teacher_logprob}\n",
        MATHS + SKIP,
        MATHS + SKIP.replace("skip", "skip, write: teacher_logprob"),
        MATHS + SKIP.replace("skip", "skip, write: {teacher_logprob: teacher_logprob}"),
        MATHS + TOLD + READS_TOLD + "write: told_logprob}\n" + SKIP.replace("[maths", "[told_logprob, maths")
        .replace("skip}", "skip, write: {teacher_mask: unread}}"),
    ],
)  # fmt: skip
def test_a_mask_of_the_rows_that_a_teacher_reads_is_accepted(project, nodes: str) -> None:
    check_file(project.pipeline(ADVANTAGE, (TEACHER, nodes)))


@pytest.mark.parametrize(
    ("nodes", "place", "code"),
    [
        # Masks of other rows.
        (TOLD + CHOSEN, "nodes.teacher.rows", "rows-without-log-probs"),
        (TOLD + CHOSEN.replace("data_set: [train]", "teacher_mask: [0]"), "nodes.teacher.rows", "rows-without"),
        (TOLD + CHOSEN.replace("data_set: [train]", "teacher_mask: [0, 1]"), "nodes.teacher.rows", "rows-without"),
        (TOLD + CHOSEN.replace("[train]", "[train], teacher_mask: [1]"), "nodes.teacher.rows", "rows-without"),
        (MATHS + SKIP.replace("skip", "skip, write: other_logprob") + CHOSEN, "nodes.teacher.rows", "rows-without"),
        (
            TOLD + MATHS + SKIP.replace("skip}", "skip, write: {teacher_mask: unread}} #!"),
            "nodes.merged.uncovered",
            "rows-without-log-probs",
        ),
        # Readers that know no mask.
        (TEACHER + MATHS + OF_REFERENCE, "nodes.merged.uncovered", "rows-without-log-probs"),
        # Other kinds.
        (f"{TEACHER[:-1]}\n".replace("teacher_log", "maths_log")
         + "  merged: {op: merge, columns: [response_tokens]} #!\n", "nodes.merged.columns[0]", "wrong-column-kind"),
        (MATHS + "  merged: {op: merge, columns: [maths_topk_ids]} #!\n", "nodes.merged.columns[0]", "wrong-column"),
        (MATHS + "  merged: {op: merge, columns: [response_mask]} #!\n", "nodes.merged.columns[0]", "wrong-column"),
        (MATHS + "  merged: {op: merge, columns: [maths_logprob, response_mask]} #!\n", "nodes.merged.columns[1]",
         "wrong-column-kind"),
        (MATHS.replace("top_k: 4", "statistics: [entropy]") + "  merged: {op: merge, columns: [entropy]} #!\n",
         "nodes.merged.columns[0]", "wrong-column-kind"),
    ],
)  # fmt: skip
def test_rows_without_log_probs_and_other_numbers_are_not_learnt_from(project, nodes, place, code) -> None:
    edits = [ADVANTAGE, (TEACHER, nodes)]
    if "ref_logprob}" in nodes:
        edits.append(REF)
    problems = project.problems(project.pipeline(*edits))
    assert [(each.place, each.code[: len(code)]) for each in problems] == [(place, code)]


@pytest.mark.parametrize("ids", [IDS, IDS.replace("write: teacher_topk_ids", OWN_NAME)])
def test_candidates_of_several_teachers_are_merged(project, ids: str) -> None:
    select = "" if "mask_of_ids" in ids else ", read_from: [ids]"
    learns = (OVER_MERGED[0], OVER_MERGED[1].replace(", read_from: [ids]", select))
    path = project.pipeline((NO_ADVANTAGE[0], (MATHS + ids + PROBS).rstrip()), learns, REF)
    inputs = check_file(path).graph.nodes["update"].inputs
    assert [inputs[name].node for name in ("teacher_topk_ids", "teacher_topk_logprob")] == ["ids", "probs"]
    assert inputs["teacher_mask"].node == ("ids" if select else "probs")


def test_two_masks_of_candidates_are_selected_as_the_message_says(project) -> None:
    learns = (OVER_MERGED[0], OVER_MERGED[1].replace(", read_from: [ids]", ""))
    path = project.pipeline((NO_ADVANTAGE[0], (MATHS + IDS + PROBS).rstrip()), learns, REF)
    assert "`read_from: [ids]` in `update`" in project.only_problem(path).message


def test_a_mask_of_told_prompts_is_named_once_with_a_way_out(project) -> None:
    chosen = CHOSEN.replace("write:", "top_k: 4, write:")
    path = project.pipeline((NO_ADVANTAGE[0], (TOLD + chosen).rstrip()), OVER_TOKENS, REF)
    assert "`rows: {teacher_mask: [1]}`" in project.only_problem(path).message


def test_candidates_that_are_not_merged_are_found(project) -> None:
    learns = (OVER_MERGED[0], OVER_MERGED[1].replace(", read_from: [ids]", ""))
    path = project.pipeline((NO_ADVANTAGE[0], (MATHS + SKIP).rstrip()), learns, REF)
    messages = [each.message for each in project.problems(path) if each.code == "missing-column"]
    assert "`{op: merge, columns: [maths_topk_ids], write: teacher_topk_ids}`" in messages[0]
    assert "`{op: merge, columns: [maths_topk_logprob], write: teacher_topk_logprob}`" in messages[1]
