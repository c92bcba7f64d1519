"""Agent rollouts with a real model: unmodified clients, and exactly the tokens that a plain rollout samples."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from work import changed

from dagrl.backends.backend import RankContext
from dagrl.backends.base import EngineLostError
from dagrl.backends.hf.engine import HfEngine
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.data.batch import Batch
from dagrl.ops.agents import play as play_module
from dagrl.ops.agents.play import AgentFailedError
from dagrl.ops.agents.setup import agent_setup
from dagrl.ops.base import Context, OpInput, Output
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
        "initializer_range": 0.4,
    },
    tokenizer=TokenizerSpec(kind="characters", alphabet="0123456789+="),
)
PROMPTS = ("1+1=", "1+1=", "2+3=", "2+3=", "10+7=", "10+7=", "4+4=", "4+4=")
AGENTS = """
import asyncio, uuid
from dagrl.environments.failures import EnvironmentFailedError
from pathlib import Path

HERE = Path(__file__).parent

# Agents of one call may run in several processes.
def marks(name):
    return list(HERE.glob(f"{name}.*"))

def mark(name):
    path = HERE / f"{name}.{uuid.uuid4().hex}"
    path.touch()
    return path

async def once(client, row):
    answer = await client.chat.completions.create(model="policy", messages=row["messages"])
    return {"reward": float(len(answer.choices[0].message.content)), "asked": 1}

async def twice(client, row):
    messages = list(row["messages"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages += [answer.choices[0].message, {"role": "user", "content": "+1="}]
    return 0.5

async def branches(client, row):
    ask = lambda text: client.chat.completions.create(model="x", messages=[{"role": "user", "content": text}])
    await asyncio.gather(*(ask(text) for text in ("1+", "2+", "3+")))
    return 1.0

async def fails(client, row):
    if row["sample_id"] % 2:
        raise RuntimeError("no idea")
    return await once(client, row)

async def talks_forever(client, row):
    while True:
        await once(client, row)

async def second_time(client, row):
    reward = await once(client, row)
    if not marks(f"tried {row['sample_id']}"):
        mark(f"tried {row['sample_id']}")
        raise ConnectionError("not yet")
    return reward

async def never_starts(client, row):
    await once(client, row)
    raise EnvironmentFailedError("start", "no room")

async def starts_late(client, row):
    tried = marks(f"start {row['sample_id']}")
    mark(f"start {row['sample_id']}")
    if tried:
        raise ConnectionError("not yet")
    await never_starts(client, row)

async def silent(client, row):
    await once(client, row)

async def pauses(client, row):
    mark("begun")
    messages = list(row["messages"])
    for turn in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        messages += [answer.choices[0].message, {"role": "user", "content": "+1="}]
        if not turn:
            mark("held")
        while marks("hold"):
            await asyncio.sleep(0.01)
    return float(len(marks("begun")))

async def looks_up(client, row):
    await client.chat.completions.create(model="policy", messages=row["messages"], max_tokens=4)
    mark("held")
    while marks("hold"):
        await asyncio.sleep(0.01)

async def counted(client, row):
    running = mark("running")
    most = len(marks("running"))
    await once(client, row)
    most = max(most, len(marks("running")))
    await asyncio.sleep(0.02)
    running.unlink()
    return {"reward": 0.0, "most": most}

async def sleeps(client, row):
    await once(client, row)
    await asyncio.sleep(100)
"""
COMMAND = """
import json, os, sys, urllib.request

row = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": row["messages"]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print("said", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
if row["sample_id"] == 1:
    sys.exit("gives up")
with open(os.environ["DAGRL_RESULT"], "w") as file:
    json.dump({"reward": 2.0}, file)
"""


class StartingEngine(HfEngine):
    """One that passes completions on by itself, as servers do."""

    serializes_calls = False

    def start_generating(self, requests, sampling, deliver) -> Future[None]:
        def call() -> None:
            for completion in self.generate(requests, sampling):
                deliver(completion)

        return self.threads.submit(call)


@pytest.fixture(scope="module")
def engine(request) -> HfEngine:
    spec = HfEngineSpec(backend="hf", group="rollout", max_batch_size=64)
    kind = getattr(request, "param", HfEngine)
    engine = kind(MODEL, spec, RankContext(0, 1, "127.0.0.1", 0, 10.0, 11))
    engine.threads = ThreadPoolExecutor(16)
    return engine


with_both = pytest.mark.parametrize("engine", [HfEngine, StartingEngine], indirect=True, ids=["waits", "passes_on"])


@pytest.fixture
def play(bench, engine: HfEngine) -> Callable[..., list[Output]]:
    bench.write_module("bots", AGENTS)
    sys.modules.pop("bots", None)
    (bench.folder / "bot.py").write_text(COMMAND)

    def play(
        agent: Any = None,
        *,
        prompts: tuple[str, ...] = PROMPTS,
        tokens: int = 12,
        aborted: Callable[[], bool] = bool,
        reward: str = "exact",
        like: Context | None = None,
        context: Context | None = None,
        short: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Output]:
        """`short` is the sampling of the source of the first four prompts."""
        node: dict[str, Any] = {
            "op": "rollout",
            "engine": "generator",
            "n": 2,
            "sampling": {"max_new_tokens": tokens},
            **options,
        }
        if agent is not None:
            node["agent"] = agent
        if context is None:
            nodes = {"rollout": node, "reward": {"op": "reward", "fn": reward}}
            train = {"short": {"path": "a.parquet", "sampling": short}, "usual": "b.parquet"}
            sources = {"data": {"train": train}} if short else {}
            made = bench.context("rollout", engine=engine, nodes=nodes, **sources)
            context = replace(made, aborted=aborted, resources=like.resources if like else made.resources)
        each = context.sequences
        prompts = tuple(prompt for prompt in prompts for _ in range(each))
        rows = list(range(len(prompts)))
        batch = bench.batch(
            rows,
            prompt_tokens=list(prompts),
            group_id=[row // 2 // each for row in rows],
            answer=["7"] * len(rows),
            data_source=["sums"] * len(rows),
            extra_info=["{}"] * len(rows),
            messages=[f'[{{"role": "user", "content": "{prompt}"}}]' for prompt in prompts],
            data_set=["short" if row < 4 * each else "usual" for row in rows],
        )
        play.last = context
        outputs = list(rollout([OpInput(0, batch)], context))
        for output in outputs:
            if not output.unfinished:
                assert set(output.columns) | {"routed_experts"} == set(context.node.contract().writes)
        return outputs

    play.folder = bench.folder
    return play


def together(outputs: list[Output]) -> Batch:
    whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs if not output.unfinished])
    return whole.in_order(np.sort(whole.rows))


@pytest.mark.parametrize("short", [None, {"max_new_tokens": 3, "temperature": 0.5}])
def test_a_trajectory_of_one_request_has_the_tokens_of_the_rollout_without_an_agent(play, short) -> None:
    plain, agent = together(play(short=short)), together(play("bots:once", short=short))
    assert agent["response_tokens"].lengths[:4].max() <= (3 if short else 12) < 13
    assert agent.rows.tolist() == plain.rows.tolist() == list(range(8))
    for name in ("response_tokens", "response_mask", "finish_reason", "policy_version"):
        assert agent[name].values.tolist() == plain[name].values.tolist()
    np.testing.assert_allclose(agent["rollout_logprob"].values, plain["rollout_logprob"].values, atol=1e-5)
    assert (agent["excluded"].values == 0).all()


@with_both
def test_later_requests_continue_with_the_sampled_tokens(play, bench) -> None:
    batch = together(play("bots:twice", tokens=20))
    for row in range(8):
        tokens, turns = batch["response_tokens"][row], batch["token_turn"][row]
        assert batch["turns"].values[row] == 2 and ((turns == 1).sum(), (turns == 2).sum()) <= (6, 6)
        assert (batch["response_mask"][row] > 0).tolist() == (turns > 0).tolist()
        assert bench.tokenizer.decode(tokens[turns == 0]) == "+1="
        assert batch["agent_reward"].values[row] == 0.5


@with_both
def test_parallel_requests_are_rows_of_one_trajectory(play) -> None:
    outputs = play({"function": "bots:branches", "sequences": 4}, prompts=PROMPTS[:2])
    batch = together(outputs)
    assert batch.rows.tolist() == list(range(8))
    assert sorted(map(len, (batch["prompt_tokens"][row] for row in range(8)))) == [1, 1, *[2] * 6]
    shares = batch["trajectory_share"].values.reshape(2, 4)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)
    assert (np.sort(shares, axis=1)[:, 0] == 0).all() and (np.sort(shares, axis=1)[:, 1:] > 0).all()
    assert outputs[0].stats["agent/requests"].mean == 3
    assert outputs[0].stats["agent/dropped_token_fraction"].mean == 0
    (kept,) = play({"function": "bots:branches"}, prompts=PROMPTS[:2])
    assert 0 < kept.stats["agent/dropped_token_fraction"].mean < 1


def test_a_failed_agent_is_left_out_given_nothing_or_ends_the_run(play) -> None:
    masked = together(play("bots:fails"))
    failed = np.arange(8) % 2 == 1
    assert (masked["excluded"].values > 0).tolist() == failed.tolist()
    assert [reason == "error" for reason in masked["finish_reason"].strings()] == failed.tolist()
    zero = together(play({"function": "bots:fails", "on_error": "zero"}))
    assert (zero["excluded"].values > 0).tolist() == failed.tolist(), "nothing was sampled in them"
    assert (zero["agent_reward"].values[failed] == 0).all()
    with pytest.raises(AgentFailedError, match=r"bots:fails.*sample 1.*RuntimeError: no idea .*bots.py:"):
        play({"function": "bots:fails", "on_error": "stop"}, prompts=PROMPTS[:2])


def test_a_failed_agent_is_run_again_with_the_same_draws(play) -> None:
    plain = together(play(prompts=PROMPTS[:2]))
    (output,) = play({"function": "bots:second_time", "retries": 1}, prompts=PROMPTS[:2])
    batch = together([output])
    assert batch["response_tokens"].values.tolist() == plain["response_tokens"].values.tolist()
    assert output.stats["agent/retries"].mean == 1 and output.stats["agent/failed_fraction"].mean == 0
    counts = output.counts
    assert (counts["sampled"] - counts["retried"]).tolist() == counts["held"].tolist()
    assert counts["retried"].min() > 0 and not counts["agent_failed"].any()


def test_failures_are_retried_and_treated_by_their_class(play) -> None:
    (output,) = play({"function": "bots:starts_late", "retries": {"start": 1}}, prompts=PROMPTS[:2])
    assert output.stats["agent/retries"].mean == 1, "the second attempt fails in its program, which is not retried"
    assert output.stats["agent/failed/program"].mean == output.stats["agent/failed_fraction"].mean == 1
    assert output.stats["failed/agent"].mean == output.stats["agent/failed/start"].mean == 0
    never = {"function": "bots:never_starts", "retries": {"program": 9}}
    (output,) = play(never, prompts=PROMPTS[:2])
    assert output.stats["failed/agent"].mean == output.stats["agent/failed/start"].mean == 1
    assert together([output])["excluded"].values.all() and output.stats["agent/retries"].mean == 0
    with pytest.raises(AgentFailedError, match=r"bots:never_starts.*no room"):
        play({**never, "on_error": {"start": "stop"}}, prompts=PROMPTS[:2])
    zero = together(play({**never, "on_error": {"start": "zero", "program": "stop"}}, prompts=PROMPTS[:2]))
    assert (zero["agent_reward"].values == 0).all() and not zero["excluded"].values.any()


def test_a_reward_that_a_node_takes_must_be_given(play) -> None:
    batch = together(play("bots:silent", prompts=PROMPTS[:2]))
    assert np.isnan(batch["agent_reward"].values).all() and not batch["excluded"].values.any()
    batch = together(play("bots:silent", prompts=PROMPTS[:2], reward="agent"))
    assert batch["excluded"].values.all()


def test_an_agent_without_turns_left_has_failed_the_task(play) -> None:
    (output,) = play("bots:talks_forever", prompts=PROMPTS[:2], max_turns=3)
    assert output.stats["agent/requests"].mean == 3
    assert output.stats["agent/failed_fraction"].mean == 0
    batch = together([output])
    assert batch["finish_reason"].strings() == ["turns"] * 2
    assert (batch["agent_reward"].values == 0).all() and (batch["excluded"].values == 0).all()


@with_both
def test_a_slow_agent_is_stopped(play) -> None:
    (output,) = play({"function": "bots:sleeps", "timeout_s": 12.0}, prompts=PROMPTS[:2])
    assert output.stats["agent/failed_fraction"].mean == 1
    batch = together([output])
    assert (batch["response_mask"].values == 0).all() and len(batch["response_mask"].values) > 2


def test_more_agents_run_than_the_engine_takes_requests_and_no_more_than_may(play, engine, monkeypatch) -> None:
    monkeypatch.setattr(engine, "_max_batch_size", 1)
    outputs = play("bots:counted")
    assert max(output.stats["agent/most"].high for output in outputs) == len(PROMPTS)


def test_chunks_of_a_worker_share_the_slots_of_its_agents(play) -> None:
    agent = {"function": "bots:counted", "concurrency": 3}
    play(agent)
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: play(agent, like=play.last), range(2))]
    assert [len(together(outputs)) for outputs in found] == [8, 8]
    assert max(output.stats["agent/most"].high for outputs in found for output in outputs) == 3


WORKER = WorkerId("generator", 0)
PAUSED = {"partial_rollout": True, "over_sampling_batch_size": 8}


def pause(play, agent: Any, **options: Any) -> tuple[Output, Context]:
    """The output of a call that is aborted while agents think, and the context of one that goes on with them."""
    (play.folder / "hold.on").touch()
    for mark in play.folder.glob("held.*"):
        mark.unlink()

    def are_held() -> bool:
        return len([*play.folder.glob("held.*")]) == 2

    outputs = play(agent, prompts=PROMPTS[:2], aborted=are_held, **PAUSED, **options)
    assert [output.unfinished for output in outputs] == [True]
    assert not outputs[0].columns, "agents go on in this worker"
    return outputs[0], replace(changed(play.last, step=2, begun={0: PausedGroup(WORKER, 1, 0)}), aborted=bool)


def go_on(play, context: Context) -> Output:
    (play.folder / "hold.on").unlink(missing_ok=True)
    (output,) = play(prompts=PROMPTS[:2], context=context)
    return output


@with_both
def test_an_agent_continues_in_a_later_call(play, engine, monkeypatch) -> None:
    whole = together(play("bots:pauses", prompts=PROMPTS[:2], tokens=20))
    left, later = pause(play, "bots:pauses", tokens=20)
    monkeypatch.setattr(engine, "policy_version", 1)
    output = go_on(play, later)
    batch = together([output])
    for name in ("response_tokens", "response_mask", "token_turn"):
        assert batch[name].values.tolist() == whole[name].values.tolist(), name
    assert batch["agent_reward"].values.tolist() == [4, 4], "two agents began for each of the two batches"
    versions, turns = batch["token_version"].values, batch["token_turn"].values
    assert versions.tolist() == [{0: -1, 1: 0, 2: 1}[turn] for turn in turns.tolist()]
    assert batch["policy_version"].values.tolist() == [0, 0]
    assert (left.sampled, output.sampled) == ((turns == 1).sum(), (turns == 2).sum())
    assert output.stats["rollout/begun_token_fraction"].mean == left.sampled / (turns > 0).sum()
    assert (left.counts["sampled"].sum(), output.counts["sampled"].sum()) == (left.sampled, output.sampled)
    assert output.counts["begun"].tolist() == left.counts["sampled"].tolist()
    assert (output.counts["sampled"] + output.counts["begun"]).tolist() == output.counts["held"].tolist()


@with_both
def test_a_reply_continues_after_the_tokens_that_were_sampled_before_an_abort(play, engine, monkeypatch) -> None:
    whole = together(play("bots:once", prompts=PROMPTS[:2]))
    generate, both_asked = engine.generate, threading.Barrier(2)

    def aborted(requests, sampling):
        # A request after the first abort would wait for the later call.
        if len(requests) == 1:
            both_asked.wait(30)
        for each in generate(requests, sampling):
            begun = {"tokens": each.tokens[:2], "logprobs": each.logprobs[:2], "finish_reason": "abort"}
            yield replace(each, **begun) if len(each.tokens) > 2 else each

    with monkeypatch.context() as patched:
        patched.setattr(engine, "generate", aborted)
        patched.setattr(play_module, "_GATHER_S", 30.0)
        left, later = pause(play, "bots:once")
    monkeypatch.setattr(engine, "policy_version", 1)
    masking = later.rollout.model_copy(update={"mask_offpolicy_in_partial_rollout": True})
    nodes = {**later.pipeline.nodes, "rollout": masking}
    later.resources.pipeline = later.pipeline.model_copy(update={"nodes": nodes})
    output = go_on(play, later)
    batch = together([output])
    assert batch["response_tokens"].values.tolist() == whole["response_tokens"].values.tolist()
    np.testing.assert_allclose(batch["rollout_logprob"].values, whole["rollout_logprob"].values, atol=1e-5)
    versions = [batch["token_version"][row].tolist() for row in range(2)]
    assert left.sampled >= 4 and {tuple(each[:3]) for each in versions} == {(0, 0, 1)}
    assert batch["response_mask"].values.tolist() == batch["token_version"].values.tolist()


def test_an_agent_whose_tokens_are_too_old_starts_again(play, engine, monkeypatch) -> None:
    _, later = pause(play, "bots:pauses", tokens=20)
    monkeypatch.setattr(engine, "policy_version", 5)
    output = go_on(play, later)
    assert output.stats["rollout/outdated_fraction"].mean == 1
    assert (output.counts["outdated"].tolist(), output.counts["begun"].tolist()) == ([1, 1], [0, 0])
    assert together([output])["policy_version"].values.tolist() == [5, 5]


def test_an_agent_that_no_worker_has_any_more_starts_again(play) -> None:
    _, later = pause(play, "bots:pauses", tokens=20)
    whole = go_on(play, changed(later, begun={0: PausedGroup(WORKER, 1, 7)}))
    assert whole.stats["rollout/begun_token_fraction"].mean == 0
    assert (whole.counts["outdated"].tolist(), whole.counts["begun"].tolist()) == ([0, 0], [0, 0])


def test_time_that_an_agent_is_paused_is_not_its_own(play) -> None:
    paused_s, begun = 3.0, time.monotonic()
    _, later = pause(play, "bots:pauses", tokens=20)
    time.sleep(paused_s)
    output = go_on(play, later)
    assert output.stats["agent/seconds"].high <= time.monotonic() - begun - paused_s


def test_an_agent_that_ends_while_it_waits_for_a_slot_leaves_it_to_others(play) -> None:
    _, later = pause(play, {"function": "bots:looks_up", "concurrency": 2}, tokens=20)
    slots, loop = agent_setup(later).slots, agent_setup(later).gateway.loop
    for _ in range(2):
        # Other agents have the slots for a moment.
        asyncio.run_coroutine_threadsafe(slots.acquire(), loop).result()
    (play.folder / "hold.on").unlink()
    together(play(prompts=PROMPTS[:2], context=later))
    for _ in range(2):
        loop.call_soon_threadsafe(slots.release)
    for _ in range(2):
        asyncio.run_coroutine_threadsafe(slots.acquire(), loop).result(timeout=10)


def test_a_group_that_a_full_step_did_not_take_is_passed_on_unchanged(play) -> None:
    (first,) = play("bots:once", prompts=PROMPTS[:2], **PAUSED)
    (again,) = play(prompts=PROMPTS[:2], context=replace(play.last, begun={0: Batch(first.rows, first.columns)}))
    assert again.columns.keys() == first.columns.keys()
    assert again.columns["agent_reward"] is first.columns["agent_reward"]
    assert again.stats.keys() == {"rollout/begun_token_fraction"} and not again.sampled
    assert again.counts["sampled"].tolist() == [0] * len(again.rows) and again.counts["begun"].all()


def test_a_command_is_an_agent(play) -> None:
    (output,) = play({"command": [sys.executable, "bot.py"]}, prompts=PROMPTS[:2])
    batch = together([output])
    assert batch["agent_reward"].values.tolist() == [2.0, 0.0]
    assert batch["excluded"].values.tolist() == [0.0, 1.0]
    first, second = batch["agent_output"].strings()
    assert first.startswith("said ") and "gives up" in second
    plain = together(play(prompts=PROMPTS[:2]))
    assert batch["response_tokens"].values.tolist() == plain["response_tokens"].values.tolist()


@pytest.mark.parametrize("result", [b'\xff\xfe{"reward": 1.0}', b'{"reward": 1%s}' % (b"0" * 400), b"[" * 100_000])
def test_a_command_with_a_broken_result_has_failed(play, result: bytes) -> None:
    (play.folder / "broken").write_bytes(result)
    command = ["bash", "-c", f"cp {play.folder / 'broken'} $DAGRL_RESULT"]
    assert together(play({"command": command}, prompts=PROMPTS[:2]))["excluded"].values.all()


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "exec 0<&-; sleep 0.2",
        """echo '{"reward": 3}' > $DAGRL_RESULT""",
        "mkfifo $DAGRL_RESULT",
        "ln -s /dev/zero $DAGRL_RESULT",
        "truncate -s 17M $DAGRL_RESULT",
        "kill -9 $$",
    ],
)
def test_a_command_that_reads_no_input_or_leaves_no_usable_result_is_masked(play, script: str) -> None:
    batch = together(play({"command": ["bash", "-c", script]}, prompts=PROMPTS[:1]))
    assert batch["excluded"].values.tolist() == [1.0]


def test_a_sandboxed_command_reaches_its_endpoint_alone(play, bench) -> None:
    spying = """
import os, socket, subprocess
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
assert refused(lambda: open("/etc/passwd").read())
# Keys of other agents are in their environments.
assert refused(lambda: open(f"/proc/{os.getppid()}/environ").read()) and refused(lambda: os.listdir("/proc"))
assert refused(lambda: subprocess.run(["/bin/true"]))
assert refused(lambda: socket.create_connection(("127.0.0.1", 22), 1))
assert refused(lambda: socket.socket(socket.AF_UNIX)) and refused(lambda: socket.socket(type=socket.SOCK_DGRAM))
"""
    (bench.folder / "spy.py").write_text(spying + COMMAND)
    (output,) = play({"command": ["python", "spy.py"], "sandbox": True}, prompts=PROMPTS[:2])
    batch = together([output])
    first, second = batch["agent_output"].strings()
    assert first.startswith("said ") and "gives up" in second
    assert batch["agent_reward"].values.tolist() == [2.0, 0.0]


ENVIRONMENT = """
from dagrl.environments.contract import Unscored

class Comparing:
    def __init__(self, turns=1, broken=False):
        self.turns, self.broken = turns, broken

    async def solve(self, client, row):
        messages = list(row["messages"])
        for _ in range(self.turns):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "+1="}]
        return Unscored(said)

    async def score(self, states):
        if self.broken:
            raise ArithmeticError("no scores")
        if len(states) != 2:
            raise KeyError("a pair")
        return [{"reward": len(said) == max(map(len, states)), "asked": self.turns} for said in states]
"""


def test_an_environment_compares_the_samples_of_a_group(play, bench) -> None:
    bench.write_module("comparing", ENVIRONMENT)
    agent = {"environment": "comparing:Comparing"}
    outputs = play(agent, reward="agent")
    batch = together(outputs)
    texts = [len(bench.tokenizer.decode(batch["response_tokens"][row]).removesuffix("<eos>")) for row in range(8)]
    pairs = [(row, row + 1) for row in range(0, 8, 2) if min(texts[row : row + 2]) > 0]
    assert pairs and any(texts[one] != texts[other] for one, other in pairs)
    for one, other in pairs:
        assert batch["agent_reward"].values[one] == (texts[one] >= texts[other])
        assert batch["agent_reward"].values[other] == (texts[other] >= texts[one])
    (output,) = play({**agent, "args": {"broken": True}}, prompts=PROMPTS[:2], reward="agent")
    assert together([output])["excluded"].values.all() and output.stats["agent/failed_fraction"].mean == 1


def test_a_group_is_scored_in_the_call_in_which_the_last_of_it_ends(play, engine, bench, monkeypatch) -> None:
    bench.write_module("comparing", ENVIRONMENT)
    agent = {"environment": "comparing:Comparing", "args": {"turns": 2}}
    whole = together(play(agent, prompts=PROMPTS[:2], tokens=50, **PAUSED))
    generate, second_turns = engine.generate, []

    def aborted(requests, sampling):
        for each in generate(requests, sampling):
            second_turns.extend([each] if len(requests[each.index].begun) else [])
            if len(second_turns) == 2:
                each = replace(each, tokens=each.tokens[:1], logprobs=each.logprobs[:1], finish_reason="abort")
            yield each

    monkeypatch.setattr(engine, "generate", aborted)
    (left,) = play(agent, prompts=PROMPTS[:2], tokens=50, **PAUSED)
    assert left.unfinished and len(second_turns) == 2, "one has ended, and the other waits"
    monkeypatch.setattr(engine, "generate", generate)
    batch = together([go_on(play, changed(play.last, step=2, begun={0: PausedGroup(WORKER, 1, 0)}))])
    for name in ("response_tokens", "agent_reward", "turns"):
        assert batch[name].values.tolist() == whole[name].values.tolist()


class Service(BaseHTTPRequestHandler):
    """Solves a task with the endpoint that it is told."""

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0) as client:
            client.chat.completions.create(model="policy", messages=task["row"]["messages"])
        status, answer = (200, b'{"reward": 3, "hits": 1}') if task["row"]["sample_id"] else (503, b"\xe9chou\xe9")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


def test_a_service_is_an_agent(play) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    (output,) = play({"url": f"http://127.0.0.1:{server.server_port}/"}, prompts=PROMPTS[:2])
    server.shutdown()
    batch = together([output])
    assert batch["agent_reward"].values.tolist() == [0.0, 3.0]
    assert batch["excluded"].values.tolist() == [1.0, 0.0]
    assert output.stats["agent/hits"].mean == 1
    assert output.stats["failed/agent"].mean == output.stats["agent/failed_fraction"].mean == 0.5


@with_both
def test_an_abort_ends_agents_that_are_busy_elsewhere(play) -> None:
    begun = time.monotonic()
    (output,) = play("bots:sleeps", prompts=PROMPTS[:2], aborted=lambda: time.monotonic() > begun + 1)
    assert output.unfinished and time.monotonic() < begun + 20


@with_both
def test_an_engines_failure_ends_the_call(play, engine, monkeypatch) -> None:
    def lost(*_: Any) -> Any:
        raise EngineLostError("the server has died")

    monkeypatch.setattr(engine, "generate", lost)
    with pytest.raises(EngineLostError, match="has died"):
        play("bots:once", prompts=PROMPTS[:2])


@with_both
def test_an_agent_waits_for_a_lost_engine(play, engine, monkeypatch) -> None:
    whole = together(play("bots:pauses", prompts=PROMPTS[:2], tokens=20))
    generate = engine.generate

    def loses_second_turns(requests: Any, sampling: Any) -> Any:
        if any(len(request.begun) for request in requests):
            raise EngineLostError("the server has died")
        yield from generate(requests, sampling)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "generate", loses_second_turns)
        with pytest.raises(EngineLostError, match="has died"):
            play("bots:pauses", prompts=PROMPTS[:2], tokens=20)
    later = changed(play.last, begun={0: PausedGroup(WORKER, 1, 0)})
    batch = together(play(prompts=PROMPTS[:2], context=later))
    for name in ("response_tokens", "response_mask", "token_turn"):
        assert batch[name].values.tolist() == whole[name].values.tolist(), name
    assert len([*play.folder.glob("begun.*")]) == 4, "no program began again"
