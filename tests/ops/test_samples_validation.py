"""What a validation tells of its sets: which figures, under which names, of which responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagrl.data.batch import Column
from dagrl.ops.base import Context
from dagrl.ops.samples import validation_stats


@pytest.fixture
def measured(bench):
    """Means of the statistics of some prompts: (set, source, [(response, reward), ...]) each."""

    def measure(
        prompts: list[tuple[str, str, list[tuple[str, float]]]], val: Any, n: int = 1, **data: Any
    ) -> dict[str, float]:
        rows = [(name, source, *each) for name, source, responses in prompts for each in responses]
        batch = bench.batch(
            list(range(len(rows))),
            group_id=[row // n for row in range(len(rows))],
            data_set=[row[0] for row in rows],
            data_source=[row[1] for row in rows],
            response_tokens=[row[2] for row in rows],
            reward=[row[3] for row in rows],
        )
        return {name: stat.mean for name, stat in validation_stats(batch, context(n, val, data)).items()}

    def context(n: int, val: Any, data: dict[str, Any]) -> Context:
        nodes = {
            "rollout": {"op": "rollout", "engine": "generator", "n": 2, "val_n": n, "sampling": {"max_new_tokens": 3}},
            "reward": {"op": "reward", **data.pop("reward", {"fn": "exact"})},
        }
        return bench.context(validation=True, data={"val": val, **data}, nodes=nodes)

    return measure


def test_one_response_to_each_prompt_has_a_mean_and_a_share_of_right_ones(measured) -> None:
    found = measured([("val", "sums", [("2", 1.0)]), ("val", "sums", [("3", 0.25)])], "v.parquet")
    assert found == {"mean@1": 0.625, "pass@1": 0.5}


def test_the_file_sets_the_pass_threshold(measured) -> None:
    prompts = [("val", "sums", [("2", 1.0)]), ("val", "sums", [("3", 0.25)])]
    assert measured(prompts, "v.parquet", val_pass_reward=0.25)["pass@1"] == 1.0


def test_several_responses_are_scored_for_each_k(measured) -> None:
    prompts = [
        ("val", "sums", [("2", 1.0), ("2", 1.0), ("3", 0.0), ("4", 0.0)]),
        ("val", "sums", [("5", 0.0), ("5", 0.0), ("5", 0.0), ("6", 1.0)]),
    ]
    found = measured(prompts, "v.parquet", 4)
    assert found == pytest.approx(
        {
            "mean@4": (0.5 + 0.25) / 2,
            "pass@1": (0.5 + 0.25) / 2,
            # Of the 6 pairs of the first prompt one holds no right one, of the second's three do not.
            "pass@2": (5 / 6 + 3 / 6) / 2,
            "pass@4": 1.0,
            "std@4": (0.5 + 0.75**0.5 / 2) / 2,
            "best@2": (5 / 6 + 3 / 6) / 2,
            "best@4": 1.0,
            "worst@2": (1 / 6 + 0.0) / 2,
            "worst@4": 0.0,
            # Of two that differ each has one vote, so that they share: the first prompt's 6 pairs are 1 of two right
            # ones, 4 of a right and a wrong one, 1 of two wrong ones.
            "maj@2": ((1 + 4 / 2) / 6 + (3 / 2) / 6) / 2,
            # "2" has two of four votes; "5", which is wrong, three.
            "maj@4": (1.0 + 0.0) / 2,
        }
    )


def test_sets_and_sources_have_separate_metrics(measured) -> None:
    prompts = [
        ("aime", "2024", [("1", 1.0)]),
        ("aime", "2025", [("12", 0.0)]),
        ("sums", "sums", [("123", 1.0)]),
        ("sums", "sums", [("1", 1.0)]),
    ]
    found = measured(prompts, {"aime": "a.parquet", "sums": "s.parquet"})
    means = {name: value for name, value in found.items() if name.endswith("mean@1")}
    assert means == {"aime/mean@1": 0.5, "aime/2024/mean@1": 1.0, "aime/2025/mean@1": 0.0, "sums/mean@1": 1.0}
    lengths = {name: value for name, value in found.items() if name.endswith("response_tokens")}
    assert lengths == {"aime/response_tokens": 1.5, "sums/response_tokens": 2.0}


def test_lengths_of_a_set_are_of_all_responses_to_its_prompts(measured) -> None:
    prompts = [("aime", "a", [("1", 1.0), ("12", 0.0)]), ("sums", "s", [("123", 1.0), ("123+", 0.0)])]
    found = measured(prompts, {"aime": "a.parquet", "sums": "s.parquet"}, 2)
    assert (found["aime/response_tokens"], found["sums/response_tokens"]) == (1.5, 3.5)


def test_one_set_without_a_name_has_none_in_its_metrics(measured) -> None:
    prompts = [("val", "a", [("1", 1.0)]), ("val", "b", [("1", 0.0)])]
    found = measured(prompts, "v.parquet")
    assert found == {"mean@1": 0.5, "pass@1": 0.5, "a/mean@1": 1.0, "a/pass@1": 1.0, "b/mean@1": 0.0, "b/pass@1": 0.0}


def test_without_a_way_to_find_answers_there_is_no_majority(measured, bench) -> None:
    bench.write_module("own_rewards", "def own(response):\n    return 0.0\n")
    prompts = [("val", "sums", [("1", 1.0), ("2", 0.0)])]
    found = measured(prompts, "v.parquet", 2, reward={"fn": "own_rewards:own"})
    assert "best@2" in found
    assert not [name for name in found if name.startswith("maj")]


def test_answers_are_found_by_a_function_of_the_users_own(measured, bench) -> None:
    bench.write_module("own_votes", "def last_digit(response):\n    return response[-1:] or None\n")
    prompts = [("val", "sums", [("17", 1.0), ("27", 1.0), ("8", 0.0), ("19", 0.0)])]
    assert measured(prompts, "v.parquet", 4)["maj@4"] == 0.5
    assert measured(prompts, "v.parquet", 4, val_vote="own_votes:last_digit")["maj@4"] == 1.0


def test_a_vote_that_fails_is_named_with_its_line(measured, bench) -> None:
    bench.write_module("broken_votes", "def vote(response):\n    return response[99]\n")
    with pytest.raises(ValueError, match=r"data.val_vote broken_votes:vote raised IndexError: .*broken_votes.py:2"):
        measured([("val", "s", [("1", 1.0), ("2", 0.0)])], "v.parquet", 2, val_vote="broken_votes:vote")


def test_each_set_is_scored_for_its_own_number_of_responses(measured) -> None:
    prompts = [
        ("few", "sums", [("2", 1.0)]),
        ("few", "sums", [("3", 0.0)]),
        ("many", "sums", [("2", 1.0), ("3", 0.0), ("4", 0.0)]),
        ("many", "games", [("2", 1.0), ("2", 1.0), ("4", 0.0)]),
    ]
    val = {"few": "few.parquet", "many": {"path": "many.parquet", "n": 3}}
    found = measured(prompts, val)
    assert {name for name in found if name.startswith("val") or ("@" in name and name.startswith("few"))} == {
        "few/mean@1",
        "few/pass@1",
    }
    assert found["few/mean@1"] == 0.5
    assert found["many/mean@3"] == pytest.approx(0.5)
    # One of 3 right: 1 - C(2, 2) / C(3, 2); two of 3: 1.
    assert found["many/pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["many/sums/mean@3"] == pytest.approx(1 / 3)
    assert found["many/games/maj@3"] == 1.0


def test_what_machines_have_lost_is_no_wrong_answer_and_what_programs_have_is(bench) -> None:
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "n": 2, "val_n": 2, "sampling": {"max_new_tokens": 3}},
        "reward": {"op": "reward", "fn": "agent"},
    }
    batch = bench.batch(
        list(range(8)),
        group_id=[row // 2 for row in range(8)],
        data_set=["val"] * 8,
        data_source=["sums"] * 8,
        response_tokens=["2"] * 8,
        reward=[1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        finish_reason=["stop", "network", "stop", "error", "start", "grader", "timeout", "stop"],
    ).with_columns({"excluded": Column(np.array([0, 1, 0, 1, 1, 1, 0, 0], dtype=np.float32))})
    stats = validation_stats(batch, bench.context(validation=True, data={"val": "v.parquet"}, nodes=nodes))
    # The third prompt has no response left, the first one has one; `on_error: zero` has scored the seventh row.
    assert (stats["pass@1"].count, stats["pass@1"].mean) == (3, pytest.approx((1 + 0.5 + 0.5) / 3))
    assert (stats["pass@2"].count, stats["pass@2"].mean) == (2, 1.0)
