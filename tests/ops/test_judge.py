"""Judges: what they are asked, what becomes of what they say, and of what they do not say."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import SamplingSpec, TokenizerSpec
from dagrl.data.batch import Column
from dagrl.data.image_column import image_columns
from dagrl.model_files.images import ImageSettings
from dagrl.model_files.tokenizer import make_tokenizer
from dagrl.ops.base import OpInput, Output
from dagrl.ops.judge import JudgeError, content, judge, without_tokens
from dagrl.plugins.judging import Judged

KEY = "sk-very-secret"
QUESTION = "Task {prompt} of {data_source}: is {response} {answer}?"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)


def part_of(
    bench, responses: list[str], index: int = 0, first: int = 10, messages: list[dict] | None = None
) -> OpInput:
    rows = list(range(first, first + len(responses)))
    asked = json.dumps(messages or [{"role": "user", "content": "1+1="}])
    batch = bench.batch(
        rows, response_tokens=responses, answer=["2"] * len(rows), data_source=["sums"] * len(rows)
    ).with_columns({"messages": Column.text([asked] * len(rows))})
    return OpInput(index, batch)


def node(**options: Any) -> dict[str, Any]:
    return {"reward": {"op": "judge", "prompt": QUESTION, **options}}


def at(chat_server, **options: Any) -> dict[str, Any]:
    return node(endpoint=chat_server.url, model="judge-7b", retries=0, **options)


def means(output: Output) -> dict[str, float]:
    return {name: stat.mean for name, stat in output.stats.items()}


class TestOverAnEndpoint:
    def test_each_response_is_scored_by_what_the_judge_says_of_it(self, bench, chat_server) -> None:
        chat_server.reply = lambda body: f"It is worth {body['messages'][-1]['content'].count('2')} of it"
        parts = [part_of(bench, ["2", "3"]), part_of(bench, [], 1), part_of(bench, ["22"], 2, 12)]
        outputs = list(judge(parts, bench.context("reward", nodes=at(chat_server))))
        assert [output.shards for output in outputs] == [(0,), (1,), (2,)]
        assert [output.rows.tolist() for output in outputs] == [[10, 11], [], [12]]
        assert [output.columns["reward"].values.tolist() for output in outputs] == [[2, 1], [], [3]]
        assert outputs[0].columns["reward"].values.dtype == np.float32
        assert means(outputs[0]) == {"judge/failed_fraction": 0, "judge/reply_tokens": 2}
        assert outputs[0].sampled == 0, "nobody here has sampled them"

    def test_rows_of_other_sources_are_not_asked_about(self, bench, chat_server) -> None:
        part = part_of(bench, ["2", "3", "4"])
        part = OpInput(0, part.batch.with_columns({"data_set": Column.text(["sums", "essays", "sums"])}))
        options = at(chat_server, rows={"data_set": ["essays"]}, write="judged")
        chat_server.reply = lambda body: "7"
        (output,) = judge([part], bench.context("reward", nodes=options))
        (request,) = chat_server.requests
        assert request.body["messages"][-1]["content"] == "Task 1+1= of sums: is 3 2?"
        np.testing.assert_equal(output.columns["reward"].values, np.array([np.nan, 7, np.nan], dtype=np.float32))
        assert means(output) == {"judge/failed_fraction": 0, "judge/reply_tokens": 2, "reward/judged": 7}

    def test_the_question_is_made_of_the_sample(self, bench, chat_server) -> None:
        context = bench.context("reward", nodes=at(chat_server, system="Be {strict}: {answer}.", write="score"))
        end = [*bench.tokenizer.encode("3"), bench.tokenizer.eos_token_id]
        (output,) = judge([part_of(bench, [end])], context)
        (request,) = chat_server.requests
        assert request.body["messages"] == [
            {"role": "system", "content": "Be {strict}: {answer}."},
            {"role": "user", "content": "Task 1+1= of sums: is 3 2?"},
        ]
        assert means(output)["reward/score"] == 7

    def test_a_prompt_of_several_messages_is_shown_with_their_roles(self, bench, chat_server) -> None:
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
        list(judge([part_of(bench, ["2"], messages=messages)], bench.context("reward", nodes=at(chat_server))))
        assert "Task system: Add.\n\nuser: 1+1= of" in chat_server.requests[0].body["messages"][0]["content"]

    def test_questions_of_all_shards_are_asked_at_once(self, bench, chat_server) -> None:
        everybody = threading.Barrier(4, timeout=100)
        chat_server.reply = lambda body: str(everybody.wait() * 0 + 1)
        parts = [part_of(bench, ["2", "3"]), part_of(bench, ["2", "3"], 1, 12)]
        outputs = judge(parts, bench.context("reward", nodes=at(chat_server, concurrency=4)))
        assert [output.columns["reward"].values.tolist() for output in outputs] == [[1, 1], [1, 1]]

    def test_judges_of_one_expression_keep_to_their_own_scores(self, bench, chat_server) -> None:
        chat_server.reply = lambda body: "YES"
        nodes = {
            name: at(chat_server, parser="YES", scores={"YES": score})["reward"]
            for name, score in (("one", 1.0), ("two", 2.0))
        }
        one, two = bench.context("one", nodes=nodes), bench.context("two", nodes=nodes)
        two = replace(two, resources=one.resources)
        found = [next(iter(judge([part_of(bench, ["2"])], each))).columns["reward"].values[0] for each in (one, two)]
        assert found == [1.0, 2.0]

    def test_a_users_parser_is_given_what_it_asks_for(self, bench, chat_server) -> None:
        bench.write_module("own_parser", "def read(reply, answer):\n    return float(reply) / int(answer)\n")
        context = bench.context("reward", nodes=at(chat_server, parser="own_parser:read"))
        (output,) = judge([part_of(bench, ["2"])], context)
        assert output.columns["reward"].values.tolist() == [3.5]

    def test_a_reply_without_a_score_ends_the_run_with_the_sample(self, bench, chat_server) -> None:
        chat_server.reply = lambda body: "7" if "is 2 2" in body["messages"][0]["content"] else "no idea"
        with pytest.raises(JudgeError) as told:
            list(judge([part_of(bench, ["2", "3"])], bench.context("reward", nodes=at(chat_server))))
        said = str(told.value)
        assert said.startswith("there is no score in the judge's reply: nothing in it matches")
        assert "sample 11 data_source: sums" in said and "response: '3'" in said and "reply: 'no idea'" in said

    def test_a_parser_that_raises_is_reported_with_its_line(self, bench, chat_server) -> None:
        bench.write_module("bad_parser", "def read(reply):\n    return {}[reply]\n")
        context = bench.context("reward", nodes=at(chat_server, parser="bad_parser:read"))
        with pytest.raises(JudgeError, match=r"bad_parser:read raised KeyError: '7' \(.*bad_parser.py:2\)"):
            list(judge([part_of(bench, ["2"])], context))

    def test_failures_can_count_as_a_value(self, bench, chat_server) -> None:
        chat_server.reply = lambda body: "7" if "is 2 2" in body["messages"][0]["content"] else "no idea"
        chat_server.answers[:] = [(500, {"error": {}})]
        context = bench.context("reward", nodes=at(chat_server, on_error=-1.0, concurrency=1))
        (output,) = judge([part_of(bench, ["2", "2", "3"])], context)
        assert output.columns["reward"].values.tolist() == [-1, 7, -1]
        assert means(output)["judge/failed_fraction"] == pytest.approx(2 / 3)
        assert means(output)["failed/judge"] == pytest.approx(1 / 3), "without a reply, not without a score in it"

    def test_no_answer_ends_the_run(self, bench, chat_server) -> None:
        chat_server.answers[:] = [(400, {"error": {"message": "too long"}})]
        with pytest.raises(JudgeError, match=r"the judge has not answered: .* answers 400: .*too long"):
            list(judge([part_of(bench, ["2"])], bench.context("reward", nodes=at(chat_server))))

    def test_a_key_that_is_refused_ends_the_run_whatever_failures_count(self, bench, chat_server, monkeypatch) -> None:
        monkeypatch.setenv("JUDGE_KEY", KEY)
        chat_server.answers[:] = [(401, {"error": {"message": f"wrong key {KEY}"}})]
        context = bench.context("reward", nodes=at(chat_server, on_error=0.0, api_key_env="JUDGE_KEY"))
        with pytest.raises(JudgeError, match=r"the judge cannot be asked: .* look at the key in JUDGE_KEY") as told:
            list(judge([part_of(bench, ["2"])], context))
        assert KEY not in str(told.value)

    def test_after_a_failure_no_further_question_is_sent(self, bench, chat_server) -> None:
        chat_server.reply = lambda body: "no idea"
        chat_server.delay_s = 0.05
        context = bench.context("reward", nodes=at(chat_server, concurrency=1))
        with pytest.raises(JudgeError):
            list(judge([part_of(bench, ["2"] * 50)], context))
        assert len(chat_server.requests) < 10


class Talker:
    """Says of each question how many tokens it has, and ends with a token that ends replies."""

    def __init__(self, bench) -> None:
        self._tokenizer = bench.tokenizer
        self.asked: list[str] = []
        self.seeds: list[int] = []
        self.prompts: list[list[int]] = []
        self.images: list[tuple[np.ndarray, ...]] = []

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        self.prompts += [request.prompt.tolist() for request in requests]
        self.images += [tuple(request.images) for request in requests]
        self.asked += [self._tokenizer.decode(request.prompt) for request in requests]
        self.seeds += [request.seed for request in requests]
        self.sampling = sampling
        # The last is ready first.
        for index in reversed(range(len(requests))):
            said = [*self._tokenizer.encode(str(len(requests[index].prompt))), self._tokenizer.eos_token_id]
            yield Completion(index, np.array(said), np.zeros(len(said)), "stop", 0)


class TestOnAnEngine:
    ENGINES = {"judge": {"backend": "hf", "group": "rollout"}}  # noqa: RUF012

    def context(self, bench, engine: Talker, **options: Any):
        told = {"engine": "judge", "prompt": "{prompt}{response}", "sampling": {"max_new_tokens": 4}} | options
        return bench.context("reward", engine=engine, engines=self.ENGINES, nodes=node(**told))

    def test_replies_go_to_their_questions_and_are_counted(self, bench) -> None:
        engine = Talker(bench)
        parts = [part_of(bench, ["2", "345"]), part_of(bench, [], 1), part_of(bench, ["12"], 2, 12)]
        outputs = list(judge(parts, self.context(bench, engine)))
        assert engine.asked == ["1+1=2", "1+1=345", "1+1=12"]
        assert [output.columns["reward"].values.tolist() for output in outputs] == [[5, 7], [], [6]]
        assert means(outputs[0]) == {"judge/failed_fraction": 0, "judge/reply_tokens": 2}
        assert outputs[0].sampled == 4
        assert len(set(engine.seeds)) == 3
        assert engine.sampling.max_new_tokens == 4

    def test_the_same_sample_is_judged_with_the_same_draws(self, bench) -> None:
        one, other = Talker(bench), Talker(bench)
        list(judge([part_of(bench, ["2", "3"])], self.context(bench, one)))
        list(judge([part_of(bench, ["3"], first=11)], self.context(bench, other)))
        assert one.seeds[1:] == other.seeds

    def test_a_question_that_is_too_long_fails_alone(self, bench) -> None:
        parts = [part_of(bench, ["2", "345"])]
        (output,) = judge(parts, self.context(bench, Talker(bench), max_prompt_tokens=5, on_error=0.0))
        assert output.columns["reward"].values.tolist() == [5, 0]
        with pytest.raises(JudgeError, match="the question has 7 tokens, more than max_prompt_tokens, 5"):
            list(judge(parts, self.context(bench, Talker(bench), max_prompt_tokens=5)))

    def test_an_engine_that_has_nothing_to_judge_is_not_asked(self, bench) -> None:
        engine = Talker(bench)
        (output,) = judge([part_of(bench, [])], self.context(bench, engine))
        assert len(output.columns["reward"]) == 0 and engine.asked == []


class TestWithImages:
    """The images of a prompt are shown at their places in the question."""

    IMAGE = np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)

    def part(self, bench, response: str) -> OpInput:
        part = part_of(bench, [response], messages=[{"role": "user", "content": "1<image>+"}])
        return replace(part, batch=part.batch.with_columns(image_columns([[self.IMAGE]])))

    def test_an_endpoint_gets_a_file(self, bench, chat_server) -> None:
        list(judge([self.part(bench, "2")], bench.context("reward", nodes=at(chat_server, images=True))))
        before, shown, after = chat_server.requests[0].body["messages"][0]["content"]
        assert [before["text"], after["text"]] == ["Task 1", "+ of sums: is 2 2?"]
        file = base64.b64decode(shown["image_url"]["url"].removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(file))), self.IMAGE)

    @pytest.mark.parametrize(("patch", "sizes", "tokens"), [(4, (16, 24), 6), (8, (16, 32), 2)])
    def test_an_engine_gets_pixels_in_its_own_sizes(self, bench, patch, sizes, tokens) -> None:
        init = {"model_type": "qwen2_5_vl", "max_position_embeddings": 512}
        init |= {"vision_config": {"patch_size": patch, "spatial_merge_size": 2}}
        made = {"kind": "characters", "alphabet": "0123456789+=", "images": True}
        engines = {"judge": {"backend": "hf", "group": "rollout", "model": {"init": init, "tokenizer": made}}}
        engine = Talker(bench)
        asked = node(engine="judge", prompt="{prompt}{response}", sampling={"max_new_tokens": 4}, images=True)
        edits = {"engines": engines, "nodes": asked, "data": {"min_pixels": 64}}
        (output,) = judge([self.part(bench, "2")], bench.context("reward", engine=engine, **edits))
        (image,) = engine.images[0]
        assert image.shape == (*sizes, 3)
        if patch == 4:
            assert np.array_equal(image, self.IMAGE)
        image_token = len(bench.tokenizer)
        one, plus, two = bench.tokenizer.encode("1+2")
        assert engine.prompts == [[one, *[image_token] * tokens, plus, two]]
        assert output.columns["reward"].values.tolist() == [tokens + 3]

    def test_a_response_cannot_show_images(self) -> None:
        settings = ImageSettings(15, 4, 2, 2, (0.5,) * 3, (0.5,) * 3)
        tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+=", images=True))
        judged = Judged("1<image>", "2<|image_pad|><image>", "", "")
        messages = [{"role": "user", "content": content("{prompt}{response}", judged, (self.IMAGE,))}]
        (message,) = without_tokens(messages, tokenizer, settings)
        assert [part.get("text") for part in message["content"]] == ["1", None, "2<image>"]
