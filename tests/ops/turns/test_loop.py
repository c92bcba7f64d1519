"""Rollouts of several turns with a real model: what it says is answered, and it goes on from exactly that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from work import changed

from dagrl.backends.backend import RankContext
from dagrl.backends.base import EngineLostError
from dagrl.backends.hf.engine import HfEngine
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.data.batch import Batch
from dagrl.data.stats import Stat
from dagrl.model_files.library_model import load_hf_config
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.response import passages
from dagrl.ops.rollout import rollout
from dagrl.ops.work import PausedGroup
from dagrl.scheduler.plan import WorkerId

MODEL = ModelSpec(
    init={
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        # Wide enough that the next token depends visibly on those before it.
        "initializer_range": 0.4,
    },
    tokenizer=TokenizerSpec(kind="characters", alphabet="0123456789+="),
)
PROMPTS = ("1+1=", "1+1=", "2+3=", "2+3=", "10+7=", "10+7=", "4+4=", "4+4=")
LONGEST = 40
OTHERS = """
import threading
import time

import dagrl

hold = threading.Event()

def all_of_it(text):
    return [("echo", {"text": text[-3:]})]

@dagrl.tool
def echo(text: str, *, slow: bool = False, stuck: bool = False) -> str:
    '''Says it again.'''
    if stuck:
        hold.wait()
    if slow:
        time.sleep(0.01 * (sum(map(ord, text)) % 7))
    return "=" + text + "="

class Counting:
    def reset(self, answer, seed):
        self.answer, self.seed, self.turns = answer, seed, 0
    def step(self, response):
        self.turns += 1
        if self.answer == "raise":
            raise RuntimeError("this game is over")
        return dagrl.Observation(self.answer + str(self.seed % 10), reward=self.turns / 2, done=self.turns == 2)
"""
TOOLS = {"tools": ["others:echo"], "tool_format": "others:all_of_it", "max_turns": 3}
GAME = {"environment": "others:Counting"}


@pytest.fixture(scope="module")
def build() -> Callable[..., HfEngine]:
    def build(max_batch_size: int = 64) -> HfEngine:
        spec = HfEngineSpec(backend="hf", group="rollout", max_batch_size=max_batch_size)
        return HfEngine(MODEL, spec, RankContext(0, 1, "127.0.0.1", 0, 10.0, 11))

    return build


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    source = weight_source(MODEL, 11)
    model = AutoModelForCausalLM.from_config(load_hf_config(MODEL), dtype=torch.float32).eval()
    model.load_state_dict({name: source.get(name) for name in source.names()})
    return model


@pytest.fixture
def play(bench) -> Callable[..., list[Output]]:
    """Roll out `PROMPTS`, two to a group, with some options of the node."""
    bench.write_module("others", OTHERS)

    def play(
        engine: HfEngine,
        *,
        answers: tuple[str, ...] = ("7",) * 8,
        aborted: Callable[[], bool] = lambda: False,
        interrupted: Callable[[], bool] = lambda: False,
        after: Context | None = None,
        short: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Output]:
        """`after` is the context of an aborted call, all of whose groups may be paused; `short` the sampling of the
        first two groups' source.
        """
        sampling = {"max_new_tokens": LONGEST}
        node = {"op": "rollout", "engine": "generator", "n": 2, "sampling": sampling, **options}
        train = {"short": {"path": "a.parquet", "sampling": short}, "usual": "b.parquet"}
        sources = {"data": {"train": train}} if short else {}
        context = play.last = replace(
            bench.context("rollout", engine=engine, nodes={"rollout": node}, **sources),
            aborted=aborted,
            interrupted=interrupted,
        )
        if after is not None:
            paused = {group: PausedGroup(WorkerId("generator", 0), 1, group) for group in range(4)}
            context = replace(changed(context, begun=paused), resources=after.resources)
        rows = list(range(len(PROMPTS)))
        batch = bench.batch(
            rows,
            prompt_tokens=list(PROMPTS),
            group_id=[row // 2 for row in rows],
            answer=list(answers),
            data_source=["sums"] * len(rows),
            extra_info=["{}"] * len(rows),
            data_set=["short"] * 4 + ["usual"] * 4,
        )
        outputs = play.outputs = []
        for output in rollout([OpInput(0, batch)], context):
            outputs.append(output)
            if not output.unfinished:
                assert set(output.columns) | {"routed_experts"} == set(context.node.contract().writes)
        return outputs

    return play


def together(outputs: list[Output]) -> Batch:
    """All rows of finished outputs, in their order."""
    whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs if not output.unfinished])
    return whole.in_order(np.sort(whole.rows))


@pytest.fixture
def conversations(bench) -> Callable[[Batch], list[list[tuple[int, str]]]]:
    """Each row as (turn, text); what ends a turn is part of its text."""

    def read(batch: Batch) -> list[list[tuple[int, str]]]:
        decode = bench.tokenizer.decode
        return [[(each.turn, decode(each.tokens)) for each in passages(batch, row)] for row in range(len(batch))]

    return read


def test_each_turn_is_answered_and_the_next_one_follows_from_that(build, play, reference, bench, conversations) -> None:
    batch = together(play(build(), **TOOLS))
    assert batch.rows.tolist() == list(range(8))
    several = 0
    for row, talk in enumerate(conversations(batch)):
        for (_, said), (turn, answer) in pairwise(talk):
            if not turn:
                echo = bench.tokenizer.encode("=" + said.removesuffix("<eos>")[-3:] + "=")
                assert answer == bench.tokenizer.decode(echo)
        several += len(talk) > 1
        assert [turn for turn, _ in talk if turn] == list(range(1, batch["turns"].values[row] + 1))
        assert (batch["response_mask"][row] > 0).tolist() == (batch["token_turn"][row] > 0).tolist()
        # Another way to the log-probs: all of it at once, through the same weights.
        tokens = torch.tensor([*bench.tokenizer.encode(PROMPTS[row]), *batch["response_tokens"][row].tolist()])
        with torch.no_grad():
            logprobs = reference(tokens[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(bench.tokenizer.encode(PROMPTS[row])), len(tokens))
        expected = logprobs[places - 1, tokens[places]].numpy() * batch["response_mask"][row]
        np.testing.assert_allclose(batch["rollout_logprob"][row], expected, atol=2e-5)
    assert several >= 4


def test_a_response_ends_where_turns_or_tokens_do(build, play) -> None:
    batch = together(play(build(), **TOOLS | {"max_turns": 2}))
    reasons = batch["finish_reason"].strings()
    assert {"turns", "length"} == set(reasons)
    for row, reason in enumerate(reasons):
        assert len(batch["response_tokens"][row]) <= LONGEST
        assert batch["token_turn"][row][-1] > 0, "the last word is the policy's"
        if reason == "turns":
            assert batch["turns"].values[row] == 2


def test_responses_of_a_source_with_its_own_sampling_end_at_its_limit(build, play) -> None:
    free, mixed = (together(play(build(), **TOOLS, short=short)) for short in (None, {"max_new_tokens": 9}))
    for row in range(len(PROMPTS)):
        tokens, whole = (batch["response_tokens"][row].tolist() for batch in (mixed, free))
        assert tokens == whole[: len(tokens)], "each draw stays the same"
        assert len(tokens) <= 9 if row < 4 else tokens == whole
        if row < 4:
            # No answer is left behind that no token could follow.
            assert mixed["token_turn"][row][-1] > 0 and len(tokens) < len(whole)


@pytest.mark.parametrize("longest", [1, 6, LONGEST])
def test_a_turn_that_reaches_its_limit_is_the_last(build, play, longest: int) -> None:
    free, batch = (together(play(build(), **TOOLS, **limit)) for limit in ({}, {"max_turn_tokens": longest}))
    for row, reason in enumerate(batch["finish_reason"].strings()):
        lengths = [len(each.tokens) for each in passages(batch, row) if each.turn]
        assert max(lengths) <= longest
        assert all(length < longest for length in lengths[:-1]) or longest == 1
        assert (reason == "length") == (lengths[-1] == longest) or longest == LONGEST
        tokens = batch["response_tokens"][row]
        assert tokens.tolist() == free["response_tokens"][row][: len(tokens)].tolist(), "each draw stays the same"


def test_a_turn_ends_at_a_stop_string_that_the_policy_says(build, play, bench, conversations) -> None:
    stopping = {"sampling": {"max_new_tokens": LONGEST, "stop": ["=", "3"]}}
    talks = conversations(together(play(build(), **TOOLS, **stopping)))
    stopped = 0
    for talk in talks:
        for (turn, said), (_, answer) in pairwise(talk):
            if turn:
                assert not any(stop in said.removesuffix("<eos>")[:-1] for stop in "=3"), "answers are not searched"
                stopped += said[-1] in "=3"
                # The tool is told the stop string too, as it is no end token.
                echo = bench.tokenizer.encode("=" + said.removesuffix("<eos>")[-3:] + "=")
                assert answer == bench.tokenizer.decode(echo)
    assert stopped >= 4


def test_responses_do_not_depend_on_the_order_of_waiting(build, play) -> None:
    first = together(play(build(), **TOOLS))
    for engine, args in ((build(3), {}), (build(), {"slow": True}), (build(2), {"slow": True})):
        again = together(play(engine, **TOOLS, tool_args={"echo": args}, tool_concurrency=2))
        for name, column in first.columns.items():
            assert again[name].values.shape == column.values.shape, name
            np.testing.assert_allclose(again[name].values, column.values, atol=1e-5, err_msg=name)


def test_groups_come_one_by_one_with_their_metrics(build, play) -> None:
    outputs = play(build(), **TOOLS)
    assert sorted(output.rows.tolist() for output in outputs) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for output in outputs:
        turns, mask = output.columns["turns"].values, output.columns["response_mask"].values
        assert output.sampled == np.count_nonzero(mask)
        assert output.stats["turns"].mean == turns.mean()
        assert output.stats["turns/observation_token_fraction"].mean == pytest.approx(1 - mask.mean())
        assert output.stats["tools/calls_per_response"].mean >= turns.mean() - 1


def test_an_environment_rewards_each_turn(build, play, conversations) -> None:
    outputs = play(build(), **GAME)
    batch = together(outputs)
    ended = 0
    for row, talk in enumerate(conversations(batch)):
        rewards = [each.reward for each in passages(batch, row) if each.turn]
        assert rewards == [0.5, 1.0][: len(rewards)]
        assert batch["token_reward"][row].nonzero()[0].tolist() == [
            place
            for place, turn in enumerate(batch["token_turn"][row])
            if turn and (place + 1 == len(batch["token_turn"][row]) or batch["token_turn"][row][place + 1] != turn)
        ]
        assert all(text[0] == "7" and len(text) == 2 for turn, text in talk if not turn)
        ended += len(rewards) == 2
    assert ended >= 4
    assert outputs[0].stats["failed/environment"].mean == 0


def test_an_environment_that_fails_ends_the_run(build, play) -> None:
    with pytest.raises(
        ValueError, match=r"`others:Counting` raised RuntimeError: this game is over \(.*others\.py:\d+\)"
    ):
        play(build(), answers=("7",) * 7 + ("raise",), **GAME)


def test_an_environment_that_fails_may_end_its_response_alone(build, play) -> None:
    outputs = play(build(), answers=("7",) * 7 + ("raise",), **GAME, on_environment_error="end")
    reasons = together(outputs)["finish_reason"].strings()
    assert reasons[7] == "error"
    assert "error" not in reasons[:7]
    assert sum((each.stats["failed/environment"] for each in outputs), Stat.of(())).mean == 1 / 8


def test_a_hung_tool_blocks_no_other_response(build, play, bench) -> None:
    options = {"tool_args": {"echo": {"stuck": True}}, "tool_timeout_s": 0.05, "max_observation_tokens": 4}
    outputs = play(build(), **TOOLS, **options)
    batch = together(outputs)
    assert len(batch) == 8
    unknown = bench.tokenizer.unk_token_id
    said = [each.tokens.tolist() for row in range(8) for each in passages(batch, row) if not each.turn]
    assert said and all(tokens == [unknown] * 4 for tokens in said), "Error: no answer, in a tokenizer without letters"


def test_a_failing_engine_is_reported(build, play) -> None:
    engine = build()
    engine.sleep(Residency.ASLEEP)
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        play(engine, **TOOLS)


def aborting(engine: HfEngine) -> threading.Event:
    """Let an engine abort once, in the first group's first turns; the event is set then."""
    told = threading.Event()
    generate = engine.generate

    def generate_some(requests: Any, sampling: Any) -> Any:
        for count, completion in enumerate(generate(requests, sampling)):
            if count == 2 and not told.is_set():
                told.set()
                engine.abort()
            yield completion

    engine.generate = generate_some  # type: ignore[method-assign]
    return told


def test_an_abort_leaves_whole_groups_unfinished(build, play, bench) -> None:
    engine = build(2)
    told = aborting(engine)
    outputs = play(engine, **TOOLS)
    assert told.is_set()
    (left,) = [output for output in outputs if output.unfinished]
    assert left.columns == {}
    assert sorted(row for output in outputs for row in output.rows.tolist()) == list(range(8))
    assert len(left.rows) >= 4
    assert len(left.rows) % 2 == 0


def test_an_abort_does_not_wait_for_tools(build, play) -> None:
    began = time.monotonic()
    outputs = play(build(), **TOOLS, tool_args={"echo": {"stuck": True}}, aborted=lambda: time.monotonic() > began + 1)
    assert time.monotonic() - began < 20, "the tool never answers, and has 30 seconds for it"
    assert [output.unfinished for output in outputs] == [True]


@pytest.mark.parametrize(
    "others", [TOOLS, GAME, TOOLS | {"max_turn_tokens": 12}], ids=["tools", "environment", "short turns"]
)
def test_a_later_call_continues_aborted_responses(build, play, others) -> None:
    whole = together(play(build(2), **others))
    engine = build(2)
    told = aborting(engine)
    partial = {"partial_rollout": True, "over_sampling_batch_size": 8}
    *_, left = play(engine, **others, **partial)
    assert told.is_set() and left.unfinished and left.sampled and not left.columns
    engine.policy_version = 1
    outputs = play(engine, after=play.last, **others, **partial)
    batch = together(outputs)
    assert batch.rows.tolist() == list(range(8))
    # Groups that had ended are sampled again here, by newer weights that are the same.
    for name in ("response_tokens", "response_mask", "token_turn", "turns"):
        assert batch[name].values.tolist() == whole[name].values.tolist(), name
    np.testing.assert_allclose(batch["rollout_logprob"].values, whole["rollout_logprob"].values, atol=1e-5)
    versions, turns = batch["token_version"], batch["token_turn"]
    assert ((versions.values >= 0) == (turns.values > 0)).all()
    mixed = [row for row in range(8) if {0, 1} <= set(versions[row].tolist())]
    assert mixed and all(row in left.rows for row in mixed)
    begun = sum(int((versions[row] == 0).sum()) for row in range(8))
    assert begun == left.sampled == (turns.values > 0).sum() - sum(output.sampled for output in outputs)
    assert sum(output.stats["rollout/begun_token_fraction"].total for output in outputs) == pytest.approx(begun)


@pytest.mark.parametrize("others", [TOOLS, GAME], ids=["tools", "environment"])
def test_a_lost_engine_costs_only_the_turns_that_it_was_sampling(build, play, others, monkeypatch) -> None:
    whole = together(play(build(), **others))
    engine, asked = build(), []
    generate = engine.generate

    def loses_the_second_call(requests: Any, sampling: Any) -> Any:
        asked.append([len(request.begun) for request in requests])
        if len(asked) == 2:
            raise EngineLostError("the server has died")
        yield from generate(requests, sampling)

    monkeypatch.setattr(engine, "generate", loses_the_second_call)
    with pytest.raises(EngineLostError, match="has died"):
        play(engine, **others)
    left = play.outputs[-1]
    assert left.unfinished and not left.columns
    batch = together(play(engine, after=play.last, **others))
    for name in ("response_tokens", "response_mask", "token_turn", "turns"):
        assert batch[name].values.tolist() == whole[name].values.tolist(), name
    # Groups that had ended are sampled again here, which a run does not do.
    assert asked[2].count(0) == len(PROMPTS) - len(left.rows)
    assert sorted(begun for begun in asked[2] if begun) == sorted(asked[1])


def test_an_interrupted_attempt_keeps_conversations_of_other_servers(build, play) -> None:
    engine = build(2)
    told = aborting(engine)
    *_, left = play(engine, interrupted=told.is_set, **TOOLS)
    (paused,) = (kept for name, kept in play.last.resources.cache.items() if name.startswith("paused"))
    assert left.unfinished and len(paused.all()) == len(left.rows)
