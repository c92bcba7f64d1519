"""A rollout as the driver sees it: servers that answer in any order, and stop on request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.backends.base import RequestLimits
from dagrl.config.schema import Pipeline, Scope
from dagrl.data.redistribute import shard_bounds
from dagrl.ops.work import Carried, PartialRollout, PausedGroup, PendingWeights, RolloutWork
from dagrl.orchestrator.rollout_controller import RolloutController, RolloutReports
from dagrl.orchestrator.steps.account import RolloutFacts, StepAccount
from dagrl.orchestrator.steps.batch_index import BatchIndex
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import PlannedTask, Rows, WorkerId
from dagrl.tracking.base import Progress
from dagrl.workers.errors import RunError, WorkerDiedError
from dagrl.workers.messages import Block, Heartbeat, Usage
from dagrl.workers.worker import Worker

N = 2
BEGUN, LOST = 2, 5
COMING = PendingWeights(7, 3)
ROLLOUT = PlannedTask(
    *("rollout", "rollout", "rollout", "generator", Scope.ROW, Rows.TRAIN, "generator"),
    {"prompt_tokens": ("prompts", "prompt_tokens")},
    {"response_tokens": "response_tokens"},
    streams=True,
    generates=True,
)


def worker_of(number: int) -> WorkerId:
    return WorkerId("generator", number)


class Server:
    """The handle of a worker."""

    def __init__(self, worker: WorkerId, fake: Servers) -> None:
        self.id, self._fake = worker, fake

    async def call(self, waits_for: str, method: Callable[..., Any], *args: Any, interrupted: bool = False) -> Any:
        return self._fake.call(self.id, method, *args)

    def stream(self, work: RolloutWork, count_bytes: Callable[[int], None]) -> AsyncIterator[Block | Heartbeat]:
        return self._fake.stream(self, work)


class Servers:
    """Stands in for a fake: servers that finish a group whenever the loop comes to it, `patience` rounds apiece."""

    def __init__(self, limits: RequestLimits, patience: Sequence[int], gives_up: int | None = None) -> None:
        self.request_limits, self.patience, self.gives_up = limits, patience, gives_up
        self.works: list[tuple[str, RolloutWork]] = []
        self.aborts: set[WorkerId] = set()
        self.sampled: Counter[WorkerId] = Counter()
        self.lives: dict[WorkerId, int] = {}
        """Number of groups that a server still finishes before it dies; other servers do not die."""
        self.open_groups = self.most_open = 0
        self.generated = 0
        """Tokens of all blocks, and those that were lost."""
        self.asked = 0
        """Number of requests for the limits."""

    def servers(self, count: int) -> list[Any]:
        return [Server(worker_of(number), self) for number in range(count)]

    def call(self, worker: WorkerId, method: Callable[..., Any], *args: Any) -> Any:
        if method is Worker.request_limits:
            self.asked += 1
            return self.request_limits
        self._check(worker)
        assert method is Worker.abort
        assert args[0][:2] == (4, "rollout")
        self.aborts.add(worker)
        return None

    async def stream(self, member: Server, work: RolloutWork) -> AsyncIterator[Block | Heartbeat]:
        self.works.append((member.id, work))
        (part,) = work.parts
        yield Heartbeat(self.sampled[member.id])
        left = list(dict.fromkeys((part.rows // N).tolist()))
        self.open_groups += len(left)
        self.most_open = max(self.most_open, self.open_groups)
        while left and member.id not in self.aborts and left[0] != self.gives_up:
            for _ in range(self.patience[left[0] % len(self.patience)]):
                await asyncio.sleep(0)
            if member.id in self.aborts:
                break
            if self.lives.get(member.id, 1) <= 0:
                # It dies with tokens that no block reports.
                self.sampled[member.id] += LOST
                self.generated += LOST
                yield Heartbeat(self.sampled[member.id])
            self._check(member.id)
            if member.id in self.lives:
                self.lives[member.id] -= min(2, len(left))
            # Two at a time where there are as many: some come when there is enough already.
            now, left = left[:2], left[2:]
            self.open_groups -= len(now)
            self.sampled[member.id] += 3 * N * len(now)
            yield self._block(now, f"done {now}", work)
            yield Heartbeat(self.sampled[member.id])
        self._check(member.id)
        if left:
            yield replace(self._block(left, f"begun {left}", work), unfinished=True)

    def _block(self, groups: Sequence[int], ref: str, work: RolloutWork) -> Block:
        """Three tokens for each row, after its earlier tokens."""
        block = block_of(groups, ref)
        begun = np.where(np.isin(block.rows // N, [*work.begun]), BEGUN, 0)
        counts = {"sampled": np.full(len(block.rows), 3), "begun": begun}
        self.generated += 3 * len(block.rows)
        return replace(block, counts=counts)

    def _check(self, worker: WorkerId) -> None:
        if self.lives.get(worker, 1) <= 0:
            raise WorkerDiedError(f"{worker} died", lost=(worker,))

    def revive(self) -> None:
        """Restart the dead workers and clear all aborts."""
        self.lives = {name: left for name, left in self.lives.items() if left > 0}
        self.aborts = set()


def block_of(groups: Sequence[int], ref: str) -> Block:
    rows = np.concatenate([np.arange(group * N, (group + 1) * N) for group in groups])
    return Block(rows, ref, np.full(len(rows), 3), 0.0, 1.0, usage=Usage(3 * len(rows), None, None, None))


class WatchedIndex(BatchIndex):
    """Knows what was put into it."""

    def __init__(self, group_size: int, shards: int) -> None:
        super().__init__(group_size, shards)
        self.added: list[int] = []
        """Rows of responses."""

    def add(self, task: str, block: Block) -> None:
        super().add(task, block)
        self.added += block.rows.tolist() if task == "rollout" else []


@dataclass
class Ran:
    """A run that is over."""

    sampling: RolloutController
    index: WatchedIndex
    record: StepRecord
    fake: Servers
    shards: list[int]
    told: list[Progress]
    deaths: int = 0


@pytest.fixture(scope="module")
def ran(lab) -> Any:
    """Runs a rollout; `begun` by prompt ids, which are 100 and the group's number."""

    def run(
        fake: Servers,
        groups: int,
        needed: int,
        shards: int,
        servers: int,
        *,
        partial: bool,
        buffer: bool = False,
        begun=None,
        round_=None,
        agent=None,
    ) -> Ran:
        declared = lab.tiny_pipeline()
        declared["data"]["prompts_per_step"] = needed
        declared["nodes"]["rollout"] |= {"n": N, "partial_rollout": partial, "agent": agent}
        if buffer:
            declared["nodes"]["buffer"] = {"op": "buffer", "groups_per_step": 1}
        if groups > needed:
            declared["nodes"]["rollout"]["over_sampling_batch_size"] = groups
        facts = RolloutFacts(carries=partial)
        index, record = WatchedIndex(N, shards), StepRecord(4, StepAccount(N, {"rollout": facts}))
        for shard, (begin, end) in enumerate(shard_bounds(groups, shards)):
            rows = np.arange(begin * N, end * N)
            places = 100 + np.unique(rows // N)
            index.add_source("prompts", Block(rows, f"p{shard}", None, 0, 1, (shard,), prompts=places))
        complete: list[int] = []
        told: list[Progress] = []
        sampling = RolloutController(
            Run(4, "rollout", tuple(range(shards)), round_ or 0),
            replace(ROLLOUT, in_rounds=round_ is not None),
            Pipeline.model_validate(declared),
            fake.servers(servers),
            RolloutReports(index, record, complete.append, told.append, {}),
            committed=3,
            carried=[Carried(prompt, each, (BEGUN,) * N) for prompt, each in (begun or {}).items()],
        )
        deaths = 0
        while True:
            try:
                asyncio.run(sampling.run())
            except WorkerDiedError as loss:
                deaths += 1
                assert set(loss.lost) == {name for name, left in fake.lives.items() if left <= 0}
                fake.revive()
                todo = tuple(shard for shard in range(shards) if shard not in complete)
                sampling.retry(Run(4, "rollout", todo), fake.servers(servers))
            else:
                return Ran(sampling, index, record, fake, complete, told, deaths)

    return run


def filled(ran: Ran, layout: dict[str, int]) -> set[int]:
    """Shards that have rows."""
    return {shard for shard in range(layout["shards"]) if len(ran.index.rows((shard,)))}


def account(ran: Ran) -> dict[str, tuple[float, float]]:
    """Samples and tokens by end, without zeros, once the prompts that are left have been taken."""
    metrics = ran.record.account.metrics(ran.index.groups_in(ran.index.all_rows))
    names = [name.removeprefix("samples/") for name in metrics if name.startswith("samples/")]
    found = {name: (metrics[f"samples/{name}"], metrics[f"tokens/{name}"]) for name in names}
    for part in (0, 1):
        came = sum(found[name][part] for name in ("generated", "carried_in") if name in found)
        assert came == sum(count[part] for name, count in found.items() if name not in ("generated", "carried_in"))
    assert found["generated"][1] == ran.fake.generated
    return {name: count for name, count in found.items() if any(count)}


request_limits = st.builds(
    lambda portion, more: RequestLimits(portion, portion + more), st.integers(1, 12), st.integers(0, 12)
)
layouts = st.fixed_dictionaries({"shards": st.integers(1, 4), "servers": st.integers(1, 4)})
patience = st.lists(st.integers(0, 5), min_size=1, max_size=7)


@settings(deadline=None)
@given(limits=request_limits, layout=layouts, patience=patience, groups=st.integers(1, 12))
def test_every_group_is_sampled_once_and_no_shard_reported_twice(ran, limits, layout, patience, groups) -> None:
    over = ran(Servers(limits, patience), groups, groups, partial=False, **layout)
    sent = [row for _, work in over.fake.works for part in work.parts for row in part.rows.tolist()]
    assert sorted(sent) == list(range(groups * N))
    assert over.index.complete("rollout")
    assert len(over.shards) == len(set(over.shards))
    assert set(over.shards) < filled(over, layout), "the run ends with the last"
    assert over.told[-1] == Progress("rollout", 4, groups, groups, groups * N * 3, over.told[-1].seconds)
    assert over.fake.aborts == set()
    assert account(over) == {"generated": (groups * N, groups * N * 3), "trained": (groups * N, groups * N * 3)}


@settings(deadline=None)
@given(
    limits=request_limits,
    layout=layouts,
    patience=patience,
    needed=st.integers(1, 8),
    more=st.integers(1, 8),
    partial=st.booleans(),
)
def test_a_full_batch_stops_the_rollout_and_unfinished_prompts_are_known(
    ran, limits, layout, patience, needed, more, partial
) -> None:
    groups = needed + more
    over = ran(Servers(limits, patience), groups, needed, partial=partial, **layout)
    chosen = np.unique(over.index.rows(tuple(range(layout["shards"]))) // N).tolist()
    assert len(chosen) == needed
    left = over.sampling.unfinished()
    assert sorted([*(place - 100 for place, _, _ in left), *chosen]) == list(range(groups)), "lost, or there twice"
    assert [place for place, _, _ in left] == sorted(place for place, _, _ in left), "in their order"
    assert set(over.fake.aborts) == {worker_of(number) for number in range(layout["servers"])}
    sent = {group for _, work in over.fake.works for group in (work.parts[0].rows // N).tolist()}
    for place, begun, _ in left:
        # Groups that were sent and not finished can be continued under their ids.
        assert (begun is not None) == (partial and place - 100 in sent)
        if begun is not None:
            assert begun.rows.tolist() == [(place - 100) * N, (place - 100) * N + 1]
            assert str(place - 100) in begun.ref
    found = account(over)
    if not partial:
        assert "carried_out" not in found
    assert found["trained"] == (needed * N, needed * N * 3)
    told = over.told[-1]
    assert (told.done, told.total) == (needed, needed)


lives = st.dictionaries(st.integers(0, 3), st.integers(0, 8), max_size=4)


@settings(deadline=None)
@given(
    limits=request_limits,
    layout=layouts,
    patience=patience,
    lives=lives,
    needed=st.integers(1, 8),
    more=st.integers(0, 8),
    partial=st.booleans(),
    buffer=st.booleans(),
)
def test_no_group_is_lost_or_added_twice_if_servers_die(
    ran, limits, layout, patience, lives, needed, more, partial, buffer
) -> None:
    fake = Servers(limits, patience)
    fake.lives = {worker_of(number): groups for number, groups in lives.items() if number < layout["servers"]}
    doomed = dict(fake.lives)
    over = ran(fake, needed + more, needed, partial=partial, buffer=buffer, **layout)
    shards = tuple(range(layout["shards"]))
    chosen = np.unique(over.index.rows(shards) // N).tolist()
    assert len(chosen) == needed
    added = over.index.added
    assert len(added) == len(set(added)), "there twice"
    assert {group * N for group in chosen} <= set(added)
    left = [place - 100 for place, _, _ in over.sampling.unfinished()]
    assert sorted([*left, *chosen]) == list(range(needed + more)), "lost, or there twice"
    assert len(over.shards) == len(set(over.shards))
    # Where servers have to be stopped first, the run goes on after its last shard, unless a later step begins with what
    # it leaves, or a buffer adds to the batch.
    goes_on = more and not partial and not buffer
    assert set(over.shards) == filled(over, layout) if goes_on else set(over.shards) < filled(over, layout)
    if doomed and all(groups == 0 for groups in doomed.values()) and len(doomed) == layout["servers"]:
        assert over.deaths, "nobody lived to sample anything"


def test_partial_rollouts_go_with_their_prompts_and_are_kept_otherwise(ran) -> None:
    begun = {100 + group: PartialRollout(f"older {group}", np.arange(N)) for group in (0, 1, 5)}
    # One group at a time; the first is enough.
    over = ran(Servers(RequestLimits(1, 1), [0]), 6, 1, 1, 1, partial=True, begun=begun)
    handed = {group: what.ref for _, work in over.fake.works for group, what in work.begun.items()}
    assert handed[0] == "older 0"
    left = {place: each for place, each, _ in over.sampling.unfinished()}
    assert set(left) == {101, 102, 103, 104, 105}
    assert left[105].ref == "older 5", "it was not sent"


AGENT = {"function": "bots:once", "concurrency": 4}


def test_agents_that_were_paused_continue_where_they_run(ran) -> None:
    begun = {100 + group: PausedGroup(worker_of(group % 2), 3, 7 + group) for group in range(4)}
    fake = Servers(RequestLimits(1, 1), [2])
    over = ran(fake, 8, 5, 1, 3, partial=True, begun=begun, agent=AGENT)
    sent = {(name, group) for name, work in fake.works for group in (work.parts[0].rows // N).tolist()}
    assert {(worker_of(group % 2), group) for group in range(4)} <= sent
    assert len(sent) == len({group for _, group in sent})
    handed = {group: each for _, work in fake.works for group, each in work.begun.items()}
    assert handed == {group: begun[100 + group] for group in range(4)}
    left = {place: each for place, each, _ in over.sampling.unfinished() if each is not None}
    assert set(left) <= set(range(100, 108)), "what was left by this step, or is where it was"


def test_agents_continue_after_the_loss_of_another_server(ran) -> None:
    begun = {100: PausedGroup(worker_of(0), 3, 7), 101: PausedGroup(worker_of(1), 3, 8)}
    fake = Servers(RequestLimits(1, 1), [1])
    fake.lives = {worker_of(1): 0}
    over = ran(fake, 2, 2, 1, 2, partial=True, begun=begun, agent=AGENT)
    assert over.deaths == 1 and sorted(over.index.added) == list(range(2 * N)), "each row once"


def test_a_server_that_ends_early_ends_the_run(ran) -> None:
    with pytest.raises(RunError, match="generator has ended the responses to 1 of 4 prompts early"):
        ran(Servers(RequestLimits(2, 2), [0], gives_up=1), 4, 4, 1, 1, partial=False)


def test_servers_are_asked_for_their_limits_once(ran) -> None:
    fake = Servers(RequestLimits(2, 4), [1])
    fake.lives = {worker_of(0): 1}
    over = ran(fake, 6, 6, partial=False, shards=2, servers=2)
    assert (over.deaths, fake.asked) == (1, 1)


@pytest.mark.parametrize(("concurrency", "at_once"), [(4, 2), (40, 16)])
def test_a_server_has_as_many_agents_as_may_run_however_few_requests_its_engine_takes(
    ran, concurrency, at_once
) -> None:
    agent = {"function": "bots:once", "concurrency": concurrency}
    over = ran(Servers(RequestLimits(2, 2), [100]), 16, 16, 1, 1, partial=False, agent=agent)
    assert over.fake.most_open == at_once


@pytest.mark.parametrize(("patience", "told"), [([0], []), ([0, 50], [0])], ids=["together", "one after the other"])
def test_the_last_shards_are_reported_by_the_end_of_the_rollout(ran, patience, told) -> None:
    """So that they are taken together."""
    assert ran(Servers(RequestLimits(1, 1), patience), 2, 2, 2, 2, partial=False).shards == told


def lost_with_a_sync(lab, *, sent: bool) -> tuple[Servers, WorkerDiedError]:
    """A rollout queued behind a sync in which a server dies that takes no part in the rollout."""
    declared = lab.tiny_pipeline()
    declared["data"]["prompts_per_step"] = 1
    declared["nodes"]["rollout"] |= {"n": N}
    fake, index = Servers(RequestLimits(1, 1), [1000]), WatchedIndex(N, 1)
    index.add_source("prompts", Block(np.arange(N), "p", None, 0, 1, (0,), prompts=np.array([100])))
    sampling = RolloutController(
        Run(4, "rollout", (0,)),
        ROLLOUT,
        Pipeline.model_validate(declared),
        fake.servers(2),
        RolloutReports(
            index, StepRecord(4, StepAccount(N, {"rollout": RolloutFacts()})), lambda _: None, lambda _: None, {}
        ),
        committed=3,
        carried=(),
        weights=COMING,
    )
    loss = WorkerDiedError("generator/1 died")
    loss.lost = (worker_of(1),)

    async def act() -> WorkerDiedError:
        finishing = asyncio.ensure_future(sampling.run())
        while sent and not fake.works:
            await asyncio.sleep(0)
        sampling.lose(loss)
        with pytest.raises(WorkerDiedError) as caught:
            await finishing
        return caught.value

    return fake, asyncio.run(act())


@pytest.mark.parametrize("sent", [True, False])
def test_a_rollout_queued_behind_a_sync_ends_with_its_loss(lab, sent) -> None:
    fake, loss = lost_with_a_sync(lab, sent=sent)
    assert loss.lost == (worker_of(1),)
    assert fake.aborts == {worker_of(0), worker_of(1)}, "somebody waits for weights that do not come"
    assert [work.weights for _, work in fake.works] == [COMING] * sent


@settings(deadline=None)
@given(limits=request_limits, layout=layouts, patience=patience, needed=st.integers(1, 8), more=st.integers(0, 8))
def test_a_round_is_complete_when_nothing_more_can_arrive(ran, limits, layout, patience, needed, more):
    fake = Servers(limits, patience)
    over = ran(fake, needed + more, needed, partial=True, round_=2, **layout)
    assert {work.round for _, work in fake.works} == {2}
    # The last shard comes with the end of the run, when the aborted groups are there too.
    assert len(over.shards) < len(filled(over, layout))
    assert len(over.sampling.unfinished()) == more
