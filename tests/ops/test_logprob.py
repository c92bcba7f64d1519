"""Log-probs: of which weights, at which temperature."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from token_server import TokenServer

from dagrl.backends.base import TokenOutputs
from dagrl.config.schema import LogprobNode, TokenizerSpec
from dagrl.data.batch import Batch, Column
from dagrl.endpoint import EndpointError
from dagrl.model_files.tokenizer import make_tokenizer
from dagrl.ops.base import OpInput
from dagrl.ops.logprob import TeacherError, compare_texts, logprob

TOKENIZER = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))


class Scorer:
    """Gives each response token the log-prob -1, or -9 under the start weights and -5 under their average."""

    def __init__(self) -> None:
        self.value = -1.0
        self.outputs: TokenOutputs | None = None
        self.asked: list[tuple[float, int]] = []

    @contextmanager
    def start_weights(self) -> Iterator[None]:
        self.value = -9.0
        yield
        self.value = -1.0

    @contextmanager
    def average_weights(self) -> Iterator[None]:
        self.value = -5.0
        yield
        self.value = -1.0

    def token_outputs(self, batch: Batch, outputs: TokenOutputs, **how: Any) -> dict[str, Column]:
        self.outputs = outputs
        return dict.fromkeys(("logprob", *outputs.further), self.logprobs(batch, **how))

    def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
        self.asked.append((temperature, tokens_per_micro_batch))
        return Column.ragged([[self.value] * length for length in batch["response_tokens"].lengths], "float32")


@pytest.fixture
def parts(bench) -> list[OpInput]:
    return [
        OpInput(1, bench.batch([2, 3], prompt_tokens=["1+1=", "1="], response_tokens=["2", "345"])),
        OpInput(4, bench.batch([], prompt_tokens=[], response_tokens=[])),
    ]


def test_each_shard_gets_its_log_probs(bench, parts) -> None:
    first, empty = logprob(parts, bench.context("old", engine=Scorer()))
    assert (first.shards, first.rows.tolist()) == ((1,), [2, 3])
    assert first.columns["logprob"].lengths.tolist() == [1, 3]
    assert (empty.shards, len(empty.columns["logprob"])) == ((4,), 0)


@pytest.mark.parametrize(("work", "value"), [({}, -1.0), ({"frozen": True}, -9.0), ({"averaged": True}, -5.0)])
def test_only_a_copy_computes_with_other_weights(bench, parts, work: dict[str, bool], value: float) -> None:
    engine = Scorer()
    first, _ = logprob(parts, bench.context("old", engine=engine, **work))
    assert set(first.columns["logprob"].values.tolist()) == {value}
    assert engine.value == -1.0, "the current weights must be back afterwards"


def test_rows_of_a_source_have_its_temperature(bench) -> None:
    seen: list[Batch] = []

    class Noting(Scorer):
        def logprobs(self, batch: Batch, *, temperature: float, tokens_per_micro_batch: int) -> Column:
            seen.append(batch)
            return super().logprobs(batch, temperature=temperature, tokens_per_micro_batch=tokens_per_micro_batch)

    batch = bench.batch([0, 1, 2], prompt_tokens=["1="] * 3, response_tokens=["2", "3", "4"])
    batch = batch.with_columns({"data_set": Column.text(["greedy", "hot", "usual"])})
    samplings = {"greedy": 0.0, "hot": 1.5}
    train: dict = {
        name: {"path": "a.parquet", "sampling": {"max_new_tokens": 3, "temperature": each}}
        for name, each in samplings.items()
    }
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 3, "temperature": 0.5}},
        "old": {"op": "logprob", "engine": "actor"},
    }
    context = bench.context("old", engine=Noting(), nodes=nodes, data={"train": train | {"usual": "b.parquet"}})
    list(logprob([OpInput(0, batch)], context))
    # Greedy samples are scored at 1.
    assert seen[0]["temperature"].values.tolist() == [1.0, 1.5, 0.5]


@pytest.mark.parametrize(("sampled_at", "scored_at"), [(0.7, 0.7), (0.0, 1.0)])
def test_logits_are_divided_by_the_temperature_of_the_samples(
    bench, parts, sampled_at: float, scored_at: float
) -> None:
    engine = Scorer()
    sampling = {"max_new_tokens": 3, "temperature": sampled_at}
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "sampling": sampling},
        "old": {"op": "logprob", "engine": "actor", "tokens_per_micro_batch": 99},
    }
    list(logprob(parts, bench.context("old", engine=engine, nodes=nodes)))
    assert engine.asked == [(scored_at, 99)] * 2


@pytest.mark.parametrize(
    ("options", "outputs", "columns"),
    [
        ({}, None, ()),
        ({"top_k": 4}, TokenOutputs(top_k=4), ("topk_ids", "topk_logprob")),
        ({"candidates": "student_ids"}, TokenOutputs(at="student_ids"), ("topk_ids", "topk_logprob")),
        (
            {"statistics": ["prob_square_sum", "entropy"]},
            TokenOutputs(entropy=True, square_sum=True),
            ("entropy", "prob_square_sum"),
        ),
    ],
)
def test_a_node_asks_its_engine_for_further_outputs(bench, parts, options, outputs, columns) -> None:
    engine = Scorer()
    nodes = {
        "rollout": {"op": "rollout", "engine": "generator", "sampling": {"max_new_tokens": 3}},
        "old": {"op": "logprob", "engine": "actor", **options},
    }
    first, _ = logprob(parts, bench.context("old", engine=engine, nodes=nodes))
    assert engine.outputs == outputs
    written = LogprobNode.model_validate(nodes["old"]).contract().writes
    assert set(first.columns) == {"logprob", *columns} == set(written)


def texts_of(tokens: list[int]) -> list[str]:
    return [TOKENIZER.decode([token]) for token in tokens]


@pytest.fixture
def over_endpoint(bench, chat_server):
    """``over_endpoint(**options)``: the context of a teacher behind an endpoint."""

    def make(**options):
        teacher = {"op": "logprob", "endpoint": chat_server.url, "model": "teacher", "retries": 0, **options}
        return bench.context("teacher", nodes={"teacher": teacher})

    return make


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "texts"])
def test_an_endpoint_scores_the_rows_of_all_shards(over_endpoint, chat_server, parts, ids: bool) -> None:
    TokenServer(chat_server, None if ids else texts_of)
    first, empty = logprob(parts, over_endpoint())
    assert (first.shards, first.rows.tolist(), first.columns["logprob"].values.dtype) == ((1,), [2, 3], "float32")
    assert [first.columns["logprob"][row].tolist() for row in range(2)] == [[-4.0], [-2.0, -3.0, -4.0]]
    assert (empty.shards, len(empty.columns["logprob"])) == ((4,), 0)
    assert sorted(len(each.body["prompt"]) for each in chat_server.requests) == [5, 5]


def test_a_row_without_a_response_is_not_sent(over_endpoint, bench, chat_server) -> None:
    TokenServer(chat_server)
    batch = bench.batch([0, 1], prompt_tokens=["1=", "2="], response_tokens=[[], "34"])
    (output,) = logprob([OpInput(0, batch)], over_endpoint())
    assert output.columns["logprob"].lengths.tolist() == [0, 2]
    assert len(chat_server.requests) == 1


def test_an_endpoint_tells_the_likeliest_tokens(over_endpoint, bench, chat_server) -> None:
    TokenServer(chat_server)
    batch = bench.batch([0, 1], prompt_tokens=["1=", "2="], response_tokens=["", "34"])
    (output,) = logprob([OpInput(0, batch)], over_endpoint(top_k=3))
    ids, logprobs = output.columns["topk_ids"], output.columns["topk_logprob"]
    assert (ids[0].shape, logprobs[0].shape) == ((0, 3), (0, 3))
    assert ids[1].tolist() == [[0, 1, 2]] * 2
    assert logprobs[1].tolist() == [[-0.5, -1.0, -1.5]] * 2
    assert output.columns["logprob"][1].tolist() == [-2.0, -3.0]


def test_only_its_rows_are_sent(over_endpoint, bench, chat_server) -> None:
    TokenServer(chat_server)
    batch = bench.batch([0, 1], prompt_tokens=["1=", "2="], response_tokens=["5", "34"], data_source=["a", "b"])
    (output,) = logprob([OpInput(0, batch)], over_endpoint(rows={"data_source": ["b"]}))
    column = output.columns["logprob"]
    assert np.isnan(column[0]).all() and column[1].tolist() == [-2.0, -3.0]
    assert [len(each.body["prompt"]) for each in chat_server.requests] == [4]


def test_an_endpoint_that_scores_other_tokens_is_found_by_their_texts(over_endpoint, parts, chat_server) -> None:
    TokenServer(chat_server, lambda tokens: ["x"] * len(tokens))
    with pytest.raises(TeacherError, match=r"sample 2: 'x' is scored in place of '2'; is its tokenizer the policy's?"):
        list(logprob(parts, over_endpoint()))


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (lambda texts: [*texts[:-1], "x"], False),
        (lambda texts: [*texts[:-1], ""], False),
        (lambda texts: [*texts[:-1], texts[-1] + texts[-1]], False),
        (lambda texts: ["\N{REPLACEMENT CHARACTER}"] * len(texts), False),
        (lambda texts: [f" {text}" for text in texts], True),
        (lambda texts: [f"\u2581{text}" for text in texts], True),
        (lambda texts: [f"\u0120{text}" for text in texts], True),
    ],
    ids=["another", "none", "twice", "unreadable", "space", "sentencepiece", "bytes"],
)
def test_each_text_is_that_of_the_token(over_endpoint, parts, chat_server, changed, same: bool) -> None:
    TokenServer(chat_server, lambda tokens: changed(texts_of(tokens)))
    if same:
        assert len(list(logprob(parts, over_endpoint()))) == 2
        return
    with pytest.raises(TeacherError, match="is scored in place of"):
        list(logprob(parts, over_endpoint()))


@pytest.mark.parametrize("character", ["\u3000", "\u00a0", "\u0120", "\u2581", "\n"])
def test_characters_that_stand_for_spaces_are_those_of_the_token(character: str) -> None:
    tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet=f"12={character}"))
    (token,) = tokenizer.encode(character, add_special_tokens=False)
    compare_texts([character], np.array([token]), tokenizer)
    with pytest.raises(EndpointError, match="is scored in place of"):
        compare_texts(["1"], np.array([token]), tokenizer)


def test_texts_may_leave_out_special_tokens(over_endpoint, bench, chat_server) -> None:
    TokenServer(chat_server, lambda tokens: ["" if token == TOKENIZER.eos_token_id else "3" for token in tokens])
    response = [TOKENIZER.convert_tokens_to_ids("3"), TOKENIZER.eos_token_id]
    batch = bench.batch([0], prompt_tokens=["1="], response_tokens=[response])
    (output,) = logprob([OpInput(0, batch)], over_endpoint())
    assert output.columns["logprob"].lengths.tolist() == [2]


def test_a_failure_names_the_sample(over_endpoint, parts, chat_server) -> None:
    TokenServer(chat_server)
    chat_server.answers[:] = [(500, {"error": {"message": "out of memory"}})] * 2
    with pytest.raises(TeacherError, match=f"has not scored sample 2: {chat_server.url} answers 500: .*out of memory"):
        list(logprob(parts, over_endpoint()))


def test_a_wrong_address_is_the_teachers_and_not_a_samples(over_endpoint, parts, chat_server) -> None:
    chat_server.answers[:] = [(404, {"error": {"message": "no such model"}})] * 2
    with pytest.raises(TeacherError, match=r"the teacher cannot be asked: .*look at the address and the model's name"):
        list(logprob(parts, over_endpoint()))
