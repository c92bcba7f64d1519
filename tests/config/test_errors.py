import pickle

import pytest

from dagrl.config.errors import PipelineError, Problem, counted, dotted, listed, suggest


def test_problem_prints_file_line_place_and_message():
    assert str(Problem("p.yaml", 3, "run.steps", "is wrong; mend it")) == "p.yaml:3: run.steps: is wrong; mend it"


def test_a_problem_is_one_line_whatever_is_in_it():
    assert str(Problem("p.yaml", 3, "a\nb", "unknown key `a\nb\x1b`; ünü")) == (
        "p.yaml:3: a\\nb: unknown key `a\\nb\\x1b`; ünü"
    )


def test_problems_are_sorted_by_file_and_line_and_unique():
    late, early, other = (Problem("b", 10, "x", "m"), Problem("b", 9, "y", "m"), Problem("a", 11, "z", "m"))
    error = PipelineError([late, early, other, late])
    assert error.problems == (other, early, late)
    assert str(error).splitlines() == ["a:11: z: m", "b:9: y: m", "b:10: x: m"]


def test_error_survives_pickling():
    error = PipelineError([Problem("a", 1, "x", "m")])
    assert pickle.loads(pickle.dumps(error)).problems == error.problems


def test_places_read_as_users_write_them():
    assert dotted(("engines", "actor", "optimizer", "lr")) == "engines.actor.optimizer.lr"
    assert dotted(("track", 1)) == "track[1]"
    assert dotted(()) == "file"


def test_suggestion_is_the_nearest_name_or_all_names():
    assert suggest("stepz", ["seed", "steps"]) == "did you mean `steps`?"
    assert suggest("xyz", ["seed", "steps"]) == "choose from: seed, steps"
    assert suggest("xyz", []) == "there are no names to choose from"
    assert suggest("GRPO", ["gae", "grpo"]) == "did you mean `grpo`?"


def test_suggestion_is_what_the_word_begins():
    policies = ["ppo_clip", "clip_cov", "top_p"]
    assert suggest("ppo", policies) == "did you mean `ppo_clip`?"
    assert suggest("stop", [*policies, "stop_token_ids"]) == "did you mean `stop_token_ids`?"
    assert suggest("fp8", ["mxfp8", "fp8_e5m2", "fp8_e4m3"]) == "did you mean `fp8_e5m2` or `fp8_e4m3`?"
    assert suggest("moe", [f"moe_{each}" for each in "abcd"]) == "choose from: moe_a, moe_b, moe_c, moe_d"


def test_names_are_listed_as_in_a_sentence():
    assert listed(["a"]) == "`a`"
    assert listed(["a", "b", "c"]) == "`a`, `b` and `c`"


@pytest.mark.parametrize(("number", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1500, "1,500 rows")])
def test_a_number_agrees_with_its_noun(number: int, text: str) -> None:
    assert counted(number, "row") == text
