"""Rewards: what text is scored, by whose function, and what a failure counts."""

from __future__ import annotations

import pytest

from dagrl.data.batch import Column
from dagrl.ops.base import OpInput, Output
from dagrl.ops.reward import response_text, reward
from dagrl.rewards.score import RewardError

EOS, PAD = 1, 0


def part_of(bench, responses: list, answers: list[str], index: int = 0) -> OpInput:
    rows = list(range(10, 10 + len(responses)))
    batch = bench.batch(
        rows,
        prompt_tokens=["1+1="] * len(rows),
        response_tokens=responses,
        answer=answers,
        data_source=["sums"] * len(rows),
        extra_info=[f'{{"index": {row}}}' for row in rows],
    )
    return OpInput(index, batch)


def node(fn: str, **options) -> dict:
    return {"reward": {"op": "reward", "fn": fn, **options}}


def test_each_shard_is_scored_by_the_text_of_its_responses(bench) -> None:
    parts = [part_of(bench, ["2", "3"], ["2", "2"], 0), part_of(bench, [], [], 1), part_of(bench, ["12"], ["12"], 2)]
    outputs = list(reward(parts, bench.context("reward")))
    assert [output.shards for output in outputs] == [(0,), (1,), (2,)]
    assert [output.columns["reward"].values.tolist() for output in outputs] == [[1, 0], [], [1]]
    assert outputs[0].rows.tolist() == [10, 11]
    assert outputs[0].columns["reward"].values.dtype == "float32"
    assert not outputs[0].stats, "the reward's mean is that of the sink, and there are no failures to count"


@pytest.mark.parametrize("write", ["judged", {"reward": "judged"}])
def test_a_reward_of_another_name_has_a_mean_of_its_own(bench, write) -> None:
    context = bench.context("reward", nodes=node("exact", write=write))
    (output,) = reward([part_of(bench, ["2", "3"], ["2", "2"])], context)
    assert list(output.stats) == ["reward/judged"]
    assert (output.stats["reward/judged"].mean, output.stats["reward/judged"].count) == (0.5, 2)


def test_each_source_has_its_own_function(bench) -> None:
    bench.write_module(
        "rewards_of_sources",
        """
import dagrl

@dagrl.reward(batched=True)
def length(response, scale):
    return [{"score": scale * len(text), "letters": len(text)} for text in response]

def odd(response):
    if response == "2":
        raise ValueError("even")
    return 3.0
""",
    )
    own = {
        "long": {"fn": "rewards_of_sources:length", "args": {"scale": 2}},
        "odd": {"fn": "rewards_of_sources:odd"},
    }
    part = part_of(bench, ["2", "22", "2", "3", "333", "2"], ["2"] * 6)
    names = ["sums", "long", "odd", "odd", "long", "more"]
    part = OpInput(0, part.batch.with_columns({"data_set": Column.text(names)}))
    (output,) = reward([part], bench.context("reward", nodes=node("exact", by_source=own, on_error=-1)))
    assert output.columns["reward"].values.tolist() == [1, 4, -1, 3, 6, 1]
    assert output.columns["reward_info"].strings() == ["{}", '{"letters": 2.0}', "{}", "{}", '{"letters": 3.0}', "{}"]
    assert output.stats["reward/failed_fraction"].mean == 1 / 6
    assert output.stats["failed/reward"].mean == 0
    assert output.stats["reward_info/letters"].mean == 2.5
    # No function for the others.
    alone = {"reward": {"op": "reward", "by_source": own}}
    with pytest.raises(ValueError, match="`sums` has no reward; add `fn`"):
        list(reward([part], bench.context("reward", nodes=alone)))
    assert len(list(reward([part_of(bench, [], [])], bench.context("reward", nodes=node("exact"))))) == 1


def test_a_users_batched_function_sees_a_whole_shard_and_the_nodes_args(bench) -> None:
    bench.write_module(
        "rewards_of_a_shard",
        """
import dagrl

@dagrl.reward(batched=True)
def seen(prompt, response, answer, data_source, extra_info, bonus):
    assert prompt == ["1+1="] * 2 and data_source == ["sums"] * 2, (prompt, data_source)
    assert response == ["2", "34"] and answer == ["2", "5"], (response, answer)
    return [info["index"] + bonus for info in extra_info]
""",
    )
    context = bench.context("reward", nodes=node("rewards_of_a_shard:seen", args={"bonus": 0.5}))
    (output,) = reward([part_of(bench, ["2", "34"], ["2", "5"])], context)
    assert output.columns["reward"].values.tolist() == [10.5, 11.5]


FAILS = """
def on_three(response):
    if response == "3":
        raise KeyError("no three")
    return 1.0
"""


def test_a_failure_stops_with_the_sample_in_its_message(bench) -> None:
    bench.write_module("rewards_that_stop", FAILS)
    context = bench.context("reward", nodes=node("rewards_that_stop:on_three"))
    with pytest.raises(RewardError, match=r"(?s)KeyError: 'no three'.*sample 11\b"):
        list(reward([part_of(bench, ["2", "3"], ["2", "2"])], context))


def test_a_failure_can_count_as_a_value_and_is_counted(bench) -> None:
    bench.write_module("rewards_that_count", FAILS)
    context = bench.context("reward", nodes=node("rewards_that_count:on_three", on_error=-2.0))
    parts = [part_of(bench, ["2", "3", "3"], [""] * 3, 0), part_of(bench, ["4"], [""], 1)]
    first, second = reward(parts, context)
    assert first.columns["reward"].values.tolist() == [1, -2, -2]
    failed = first.stats["reward/failed_fraction"] + second.stats["reward/failed_fraction"]
    assert (failed.total, failed.count) == (2, 4)


FURTHER = """
def scored(response):
    return {"score": 1.0, "length": len(response)} if len(response) > 1 else 0.0
"""


@pytest.mark.parametrize(("write", "prefix"), [(None, "reward_info"), ("judged", "judged_info")])
def test_further_numbers_of_a_dict_are_metrics_and_a_column(bench, write, prefix) -> None:
    bench.write_module("rewards_with_more", FURTHER)
    context = bench.context("reward", nodes=node("rewards_with_more:scored", write=write))
    (output,) = reward([part_of(bench, ["22", "3", "444"], ["2"] * 3)], context)
    assert output.columns["reward"].values.tolist() == [1, 0, 1]
    stat = output.stats[f"{prefix}/length"]
    assert (stat.total, stat.count) == (5, 2)
    shown = [output.columns["reward_info"].strings()] if write is None else []
    assert shown == ([['{"length": 2.0}', "{}", '{"length": 3.0}']] if write is None else [])


def test_a_function_learns_why_a_response_ended(bench) -> None:
    bench.write_module("rewards_of_ends", "def ended(finish_reason):\n    return float(finish_reason == 'stop')\n")
    part = part_of(bench, ["1", "2"], ["1", "2"])
    reasons = bench.batch(part.batch.rows.tolist(), finish_reason=["stop", "length"]).columns
    part = OpInput(0, part.batch.with_columns(reasons))
    (output,) = reward([part], bench.context("reward", nodes=node("rewards_of_ends:ended")))
    assert output.columns["reward"].values.tolist() == [1, 0]


def text_of(bench, tokens: list[int], *, validation: bool = False, val_sampling: dict | None = None, **sampling) -> str:
    rollout = {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 8, **sampling}}
    if val_sampling:
        rollout["val_sampling"] = {"max_new_tokens": 8, **val_sampling}
    batch = bench.batch([0], response_tokens=[tokens])
    return response_text(batch["response_tokens"][0], bench.context(validation=validation, nodes={"rollout": rollout}))


def test_the_token_that_ended_a_response_is_no_part_of_its_text(bench) -> None:
    two, plus = bench.tokenizer.encode("2+")
    assert text_of(bench, [two, EOS]) == "2"
    assert text_of(bench, [two, plus], stop_token_ids=(plus,)) == "2"
    assert text_of(bench, [two, plus]) == "2+"
    assert text_of(bench, [EOS]) == text_of(bench, []) == ""


def test_end_tokens_of_the_generation_config_end_a_response_too(bench) -> None:
    two, plus = bench.tokenizer.encode("2+")
    (bench.folder / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {plus}]}}')
    tokens = bench.batch([0], response_tokens=[[two, plus]])["response_tokens"][0]
    assert response_text(tokens, bench.context(model={"init": None, "path": str(bench.folder)})) == "2"


def test_other_special_tokens_stay_so_that_nothing_hides_in_a_right_answer(bench) -> None:
    (two,) = bench.tokenizer.encode("2")
    assert text_of(bench, [PAD, two, EOS]) == "<pad>2"
    assert text_of(bench, [two, EOS, EOS]) == "2<eos>"
    assert text_of(bench, [two, EOS], ignore_eos=True) == "2<eos>", "it did not end the response"


def test_in_validation_its_own_sampling_says_what_ends_a_response(bench) -> None:
    two, plus, equals = bench.tokenizer.encode("2+=")
    stops = {"stop_token_ids": (plus,), "val_sampling": {"stop_token_ids": (equals,)}}
    assert text_of(bench, [two, equals], validation=True, **stops) == "2"
    assert text_of(bench, [two, plus], validation=True, **stops) == "2+"
    assert text_of(bench, [two, plus], **stops) == "2"


def test_the_end_token_of_a_validation_response_is_not_in_its_text(bench) -> None:
    two, plus, equals = bench.tokenizer.encode("2+=")
    own = {"path": "b.parquet", "sampling": {"max_new_tokens": 8, "stop_token_ids": (plus,), "ignore_eos": True}}
    context = bench.context(validation=True, data={"val": {"a": "a.parquet", "own": own}})
    for tokens, text in (([two, plus], "2"), ([two, EOS], "2"), ([two, equals], "2=")):
        batch = bench.batch([0], response_tokens=[tokens])
        assert response_text(batch["response_tokens"][0], context) == text


# -- several turns


def conversation_of(bench, *, rewards: list[float] | None = None) -> OpInput:
    """Two responses: a call, its answer and what follows from it; and one of a single turn."""
    columns = {"token_reward": [rewards, [2.0, 0.0]]} if rewards else {}
    batch = bench.batch(
        [10, 11],
        prompt_tokens=["1+1="] * 2,
        response_tokens=[[*bench.tokenizer.encode("1+1"), EOS, *bench.tokenizer.encode("=2="), 6, EOS], [7, EOS]],
        token_turn=[[1, 1, 1, 1, 0, 0, 0, 2, 2], [1, 1]],
        answer=["3", "4"],
        data_source=["sums"] * 2,
        extra_info=["{}"] * 2,
        **columns,
    )
    return OpInput(0, batch)


def test_the_last_of_several_turns_is_scored(bench) -> None:
    (output,) = reward([conversation_of(bench)], bench.context("reward"))
    assert output.columns["reward"].values.tolist() == [1, 1]


def test_a_function_may_look_at_all_turns(bench) -> None:
    bench.write_module(
        "rewards_of_turns",
        """
def seen(response, turns, turn_rewards):
    assert turns[-1] == response
    return len(turns) * 100 + len("".join(turns)) * 10 + sum(turn_rewards)
""",
    )
    context = bench.context("reward", nodes=node("rewards_of_turns:seen"))
    (output,) = reward([conversation_of(bench)], context)
    assert output.columns["reward"].values.tolist() == [240, 110]
    (output,) = reward([conversation_of(bench, rewards=[0, 0, 0, 0.5, 0, 0, 0, 0, 1])], context)
    assert output.columns["reward"].values.tolist() == [241.5, 112]
    (output,) = reward([part_of(bench, ["2"], ["2"])], context)
    assert output.columns["reward"].values.tolist() == [110], "a response of one turn is its turn"


def test_an_environments_reward_is_the_sum_over_its_turns(bench) -> None:
    context = bench.context("reward", nodes=node("environment"))
    (output,) = reward([conversation_of(bench, rewards=[0, 0, 0, 0.5, 0, 0, 0, 0, 1])], context)
    assert output.columns["reward"].values.tolist() == [1.5, 2]
    with pytest.raises(RewardError, match="no turn rewards; its rollout has no `environment`"):
        list(reward([conversation_of(bench)], context))


def test_a_sandbox_that_cannot_start_is_counted_apart_from_wrong_programs(bench, monkeypatch) -> None:
    def refuse(code: str, **_: object) -> None:
        raise OSError("code cannot be confined on this machine")

    monkeypatch.setattr("dagrl.rewards.sandbox.run", refuse)
    tests = '{"inputs": ["1"], "outputs": ["1"]}'
    part = part_of(bench, ["1", "2"], [tests, tests])
    with pytest.raises(RewardError, match="cannot be confined"):
        _coded(bench, part, monkeypatch)
    output = _coded(bench, part, monkeypatch, on_error=0)
    assert output.stats["failed/reward"].mean == output.stats["reward/failed_fraction"].mean == 0.5


def _coded(bench, part: OpInput, monkeypatch, **options) -> Output:
    """The rewards of `code`; only the first response is a program."""
    programs = iter(["print(input())", None])
    monkeypatch.setattr("dagrl.rewards.code.reward.program_in", lambda response: next(programs))
    (output,) = reward([part], bench.context("reward", nodes=node("code", concurrency=1, **options)))
    return output
