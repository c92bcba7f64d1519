"""What streams out of a worker, and what stops it; what its process does without."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from refs import Ref
from work import work_of

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import ROLLOUT_WRITES, Pipeline, SamplingSpec
from dagrl.data.batch import Batch, Column
from dagrl.ops.base import Resources
from dagrl.ops.work import ColumnSource, PartialRollout, PartWork, PendingWeights, RolloutId, RolloutWork, ScoreWork
from dagrl.plugins.calls import recorded_call
from dagrl.workers import serialization
from dagrl.workers.messages import Block, Heartbeat, SendResult, StreamMessage, UpdateWeightsRequest
from dagrl.workers.meter import Meter
from dagrl.workers.object_cache import ObjectCache
from dagrl.workers.serialization import deserialize, serialize
from dagrl.workers.worker import Worker

UPDATE_WEIGHTS = "dagrl.workers.weight_transfer.update_weights"


class Generator:
    """Answers each prompt with 7s, as many as the prompt's first token says, when `gate` lets it."""

    policy_version = 3

    def __init__(self) -> None:
        self.sampled_tokens = 0
        self.gate = threading.Semaphore(0)
        self.aborts = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        for index, request in enumerate(requests):
            self.gate.acquire(timeout=240)
            aborted = self.aborts > 0
            tokens = np.full(request.prompt[0] - len(request.begun), 7)[: 1 if aborted else None]
            self.sampled_tokens += len(tokens)
            yield Completion(index, tokens, np.zeros(len(tokens), np.float32), "abort" if aborted else "stop", 3)

    def abort(self) -> None:
        self.aborts += 1
        self.gate.release(100)


class Bench:
    """A worker with a generator, and the objects that it reads."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.store: dict[str, Any] = {}
        monkeypatch.setattr(ray, "put", self._put)
        monkeypatch.setattr(ray, "get", self._get)
        # Refs of this store take the place of Ray's.
        monkeypatch.setattr(serialization, "_packages", lambda: frozenset({"builtins", "dagrl", "numpy", "refs"}))
        self.engine = Generator()
        self.worker = Worker()
        self.worker._resources = Resources(pipeline, folder, folder)
        self.worker._engine = self.engine
        self.worker._cache = ObjectCache(1.0, keep=True)
        self.worker._meter = Meter(pipeline)

    def _put(self, thing: Any) -> str:
        self.store[f"object {len(self.store)}"] = thing
        return f"object {len(self.store) - 1}"

    def _get(self, refs: str | list[str], timeout: float | None = None) -> Any:
        return self.store[refs] if isinstance(refs, str) else [self.store[ref] for ref in refs]

    def work(self, groups: list[int], begun: dict[int, PartialRollout] | None = None) -> RolloutWork:
        """Two samples for each group's prompt, which is the group's number and two more."""
        rows = np.array([row for group in groups for row in (2 * group, 2 * group + 1)])
        columns = {
            "prompt_tokens": Column.ragged([[2 + row // 2] for row in rows], "int64"),
            "group_id": Column(rows // 2),
        }
        ref = self._put(Batch(rows, columns))
        part = PartWork(0, rows, (ColumnSource((Ref(ref),), {name: name for name in columns}),))
        outputs = {name: "said" if name == "response_tokens" else name for name in (*ROLLOUT_WRITES, "token_version")}
        return work_of(RolloutWork, "rollout", op="rollout", parts=(part,), outputs=outputs, begun=begun or {})

    def told(self, work: RolloutWork) -> Iterator[Block | Heartbeat]:
        """Its messages, one by one; what is called the last of them is."""
        last = False
        for told in self.worker.stream(work):
            assert not last, f"{told} comes behind the last"
            last = told.last
            yield from told.items

    def said(self, block: Block) -> dict[int, list[int]]:
        """Row -> response."""
        batch = block.ref
        return {int(row): batch["said"][place].tolist() for place, row in enumerate(batch.rows)}


@pytest.fixture
def bench(lab, monkeypatch, tmp_path) -> Bench:
    declared = lab.tiny_pipeline()
    declared["nodes"]["rollout"] |= {"n": 2, "over_sampling_batch_size": 10, "partial_rollout": True}
    return Bench(Pipeline.model_validate(declared), monkeypatch, tmp_path)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_chunk_queued_behind_a_sync_sends_messages_until_the_weights_arrive(bench, monkeypatch, aborted) -> None:
    monkeypatch.setattr("dagrl.workers.worker.HEARTBEAT_S", 0.05)
    monkeypatch.setattr(UPDATE_WEIGHTS, lambda *arguments: 0.5)
    told = bench.worker.stream(replace(bench.work([0]), weights=PendingWeights(5, 3)))
    bench.worker.receive_weights(UpdateWeightsRequest(4, 3))
    assert [next(told), next(told)] == [StreamMessage(()), StreamMessage(())]
    if aborted:
        bench.worker.abort(RolloutId(2, "rollout"))
        assert list(told) == []
    else:
        assert bench.worker.receive_weights(UpdateWeightsRequest(5, 3)) == 0.5
        assert next(told) == StreamMessage((Heartbeat(0),))
        bench.engine.gate.release(2)
        (block, _), *_ = [each.items for each in told if each.items]
        assert bench.said(block) == {0: [7, 7], 1: [7, 7]}


def test_a_chunk_is_streamed_group_by_group_or_together_with_heartbeats(bench) -> None:
    messages = bench.told(bench.work([0, 1, 2]))
    assert next(messages) == Heartbeat(0), "that it has begun"
    bench.engine.gate.release(2)
    first = next(messages)
    assert bench.said(first) == {0: [7, 7], 1: [7, 7]}
    assert (first.tokens.tolist(), first.usage.tokens, first.shards) == ([2, 2], 4, ())
    bench.engine.gate.release(4)
    rest = list(messages)
    blocks = [each for each in rest if isinstance(each, Block)]
    said = {row: tokens for block in blocks for row, tokens in bench.said(block).items()}
    assert said == {2: [7] * 3, 3: [7] * 3, 4: [7] * 4, 5: [7] * 4}
    assert rest[-1] == Heartbeat(2 * (2 + 3 + 4)), "the last word has all tokens"


def test_chunks_of_a_rollout_run_at_the_same_time(bench) -> None:
    first, second = (bench.told(bench.work([group])) for group in (0, 1))
    assert [type(next(messages)) for messages in (first, second)] == [Heartbeat, Heartbeat]
    bench.engine.gate.release(4)
    (later,) = [each for each in second if isinstance(each, Block)]
    (earlier,) = [each for each in first if isinstance(each, Block)]
    assert (earlier.rows.tolist(), later.rows.tolist()) == ([0, 1], [2, 3])
    assert earlier.usage.tokens + later.usage.tokens == 10


def test_an_abort_ends_current_and_later_chunks_and_partial_rollouts_continue(bench) -> None:
    messages = bench.told(bench.work([4, 5]))
    next(messages)
    bench.engine.gate.release(3)
    done = next(each for each in messages if isinstance(each, Block))
    assert done.rows.tolist() == [8, 9]
    bench.worker.abort(RolloutId(2, "rollout"))
    (left,) = [each for each in messages if isinstance(each, Block)]
    assert (left.unfinished, left.rows.tolist(), left.tokens) == (True, [10, 11], None)
    assert list(bench.told(bench.work([6]))) == []
    # The same prompt in the next step, where its rows have other numbers.
    said = bench.said(left)
    assert said[11] == [7]
    bench.engine.aborts = 0
    bench.engine.gate.release(10)
    begun = {5: PartialRollout(bench._put(left.ref), np.array([11, 10]))}
    again = replace(bench.work([5], begun), step=3)
    (block,) = [each for each in bench.told(again) if isinstance(each, Block)]
    assert bench.said(block) == {10: [7] * 7, 11: [7] * 7}
    assert block.usage.tokens == 14 - len(said[10]) - len(said[11])


def test_the_abort_of_a_round_does_not_end_the_next(bench) -> None:
    bench.worker.abort(RolloutId(2, "rollout"))
    assert list(bench.told(bench.work([0]))) == []
    bench.engine.aborts = 0
    bench.engine.gate.release(10)
    messages = list(bench.told(replace(bench.work([0]), round=1)))
    assert [each.rows.tolist() for each in messages if isinstance(each, Block)] == [[0, 1]]


def test_an_exception_of_the_engine_ends_the_chunk(bench) -> None:
    def broken(requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        raise ValueError("prompt 0 is empty")
        yield

    bench.engine.generate = broken
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        list(bench.told(bench.work([0])))


def test_the_blocks_of_a_task_have_their_columns_in_one_object(bench, monkeypatch) -> None:
    def block(rows: list[int]) -> Block:
        columns = Batch(np.array(rows), {"reward": Column(10 * np.array(rows))})
        return Block(columns.rows, columns if rows else None, None, 0, 1)

    for several, object_of in (([[7, 3], [5], []], [7, 3, 5]), ([[4]], [4]), ([[]], None)):
        monkeypatch.setattr(bench.worker, "run", lambda work, blocks=several: map(block, blocks))
        message, columns = bench.worker.run_task(*serialize(bench.work([0])))
        assert (columns and columns.rows.tolist()) == object_of
        assert object_of is None or columns["reward"].values.tolist() == [10 * row for row in object_of]
        told = deserialize(message, ["the object"])
        assert [each.rows.tolist() for each in told] == several
        assert [each.ref for each in told] == ["the object" if rows else None for rows in several]


def test_a_worker_caches_its_output_under_the_given_key(bench, monkeypatch) -> None:
    made = Batch(np.array([0, 1]), {"reward": Column(np.array([5, 7]))})
    work = work_of(ScoreWork, "ref", cache_as=b"mine")
    monkeypatch.setattr(bench.worker, "run", lambda work: iter([Block(made.rows, made, None, 0, 1)]))
    bench.worker.run_task(*serialize(work))
    (part,) = bench.worker._cache.parts(
        work.step, (PartWork(0, made.rows[::-1], (ColumnSource((b"mine",), {"r": "reward"}),)),)
    )
    assert part.batch["r"].values.tolist() == [7, 5]


def test_a_call_names_the_function_and_its_arguments(bench, monkeypatch) -> None:
    monkeypatch.setattr(UPDATE_WEIGHTS, lambda engine, rank, request, sent, timeout_s: request.version / 4)
    assert bench.worker.call(*serialize((Worker.receive_weights, (UpdateWeightsRequest(5, 3),), {}))) == 0.75


def test_weights_in_the_object_store_are_received_once_they_are_complete(bench, monkeypatch) -> None:
    handed, refs = (
        [SendResult(0.5, 8, refs={rank: "bucket"}) for rank in (0, 1)],
        (ray.ObjectRef.from_random(), ray.ObjectRef.from_random()),
    )
    bench.store |= dict(zip(refs, handed, strict=True))
    monkeypatch.setattr(UPDATE_WEIGHTS, lambda engine, rank, request, sent, timeout_s: (request.version, sent))
    assert bench.worker.call(
        *serialize((Worker.receive_weights, (UpdateWeightsRequest(5, 3, send_results=refs),), {}))
    ) == (3, handed)


def test_the_driver_and_cpu_workers_do_not_import_torch() -> None:
    """It takes each of their processes two seconds, for nothing."""
    modules = (
        "dagrl.orchestrator.run",
        "dagrl.workers.worker",
        "dagrl.ops.advantage",
        "dagrl.ops.reward",
        "dagrl.ops.prompts",
    )
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0


DYING = """
import pickle, sys
from pathlib import Path
from dagrl.plugins.calls import call
from dagrl.rewards.score import Samples, score
from dagrl.workers.messages import StartEngine
from dagrl.workers.worker import Worker

Worker().start(StartEngine(pickle.loads(bytes.fromhex(sys.argv[1])), None, Path(sys.argv[2])))

def exits(response):
    import os, time
    if response == "b":
        for _ in range(20):
            print("x" * 1_000_000, flush=True)
        until = time.monotonic() + 60
        while os.fstat(1).st_size > 10_000_000 and time.monotonic() < until:
            time.sleep(0.01)
        os._exit(3)
    return 1.0

texts = ["a", "b"]
score(exits, Samples([6, 7], texts, texts, texts, texts, [{}, {}]), args={}, on_error="stop")
"""


def test_a_worker_names_the_call_that_ends_it_and_keeps_the_ends_of_its_output(bench, tmp_path) -> None:
    log, pipeline = tmp_path / "log", pickle.dumps(bench.worker._resources.pipeline).hex()
    with log.open("ab") as output:
        command = [sys.executable, "-c", DYING, pipeline, str(tmp_path)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        assert process.wait(timeout=300) == 3, log.read_text()[-2000:]
    assert recorded_call(tmp_path, socket.gethostname(), process.pid) == "__main__:exits, sample 7"
    assert log.stat().st_size < 10_000_000
