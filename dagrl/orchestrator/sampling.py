"""One run of a rollout on all its servers: deals the prompts, follows what comes back, stops when there is enough.

dealer --groups--> servers --blocks--> ledger --> shards that are complete
                      ^                  |
                      +------ abort -----+  where more prompts were begun than the step needs

Where a server is lost the others are stopped too, and what has not arrived is sampled in a further attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dagrl.backends.base import Appetite
from dagrl.config.schema import Pipeline, RolloutNode
from dagrl.graph.filtering import over_sampled
from dagrl.orchestrator.steps.batch_index import Ledger
from dagrl.orchestrator.steps.dispatch import portion
from dagrl.orchestrator.steps.record import StepRecord
from dagrl.scheduler.commands import Run
from dagrl.scheduler.plan import PlannedTask, Rows
from dagrl.tracking.base import Progress
from dagrl.workers.errors import RunError, WorkerLostError
from dagrl.workers.groups.load_balancer import Dealer, gathering_s, helping
from dagrl.workers.groups.task_group import Crew
from dagrl.workers.groups.worker_group import Fleet, Member
from dagrl.workers.messages import Beat, Begun, Block, Coming


@dataclass(frozen=True, slots=True)
class Books:
    """Where a run is written down."""

    ledger: Ledger
    record: StepRecord
    shard_done: Callable[[int], None]
    """Hears of each shard as soon as it is complete, but not of the last ones, whose end is the run's."""
    progress: Callable[[Progress], None]
    """Hears how far the run is, often."""
    sampled: dict[str, int]
    """Worker -> tokens that its engine had sampled when it last said so; kept from run to run."""
    appetites: dict[tuple[str, int], Appetite] = field(default_factory=dict)
    """Engine and longest row -> how much its servers take at a time; kept from run to run."""


class Sampling:
    """A rollout's run under way."""

    def __init__(
        self,
        run: Run,
        task: PlannedTask,
        pipeline: Pipeline,
        fleet: Fleet,
        servers: Sequence[Member],
        books: Books,
        *,
        committed: int,
        begun: Mapping[int, Begun],
        weights: Coming | None = None,
    ) -> None:
        """`begun`: of some prompts, by their places in the data set, what earlier steps have sampled.

        `weights`: those behind which the servers begin, where some are on their way.
        """
        node = pipeline.nodes[task.node]
        assert isinstance(node, RolloutNode)
        self._run, self._task, self._node, self._pipeline = run, task, node, pipeline
        self._fleet, self._servers, self._books, self._committed = fleet, servers, books, committed
        ledger = books.ledger
        self._groups: list[int] = np.unique(ledger.groups(ledger.rows(run.shards))).tolist()
        self._training = task.rows is Rows.TRAIN
        over_samples = self._training and node.over_sampling_batch_size is not None
        self._needed = len(self._groups) - (over_sampled(pipeline) if over_samples else 0)
        ledger.expect(task.name, self._needed if over_samples else None)
        self._left = dict.fromkeys(self._groups)
        """Groups that are not part of the batch yet, in their order."""
        self._begun: dict[int, Begun] = {}
        """What there is of some of those."""
        if begun:
            places = {group: ledger.position(group) for group in self._groups}
            self._begun = {group: begun[place] for group, place in places.items() if place in begun}
        self._crew = Crew()
        self._dealer: Dealer | None = None
        self._stopped = False
        self._attempt, self._weights = 0, weights
        self._losses: list[WorkerLostError] = []
        self._tokens = self._aborted_tokens = 0
        self._start: float | None = None
        """When the first server has begun: until then they may wait for weights."""

    def again(self, run: Run, servers: Sequence[Member], weights: Coming | None = None) -> None:
        """Get ready for a further attempt: `run` is what the shards that are not complete are sampled by."""
        self._run, self._servers, self._weights = run, servers, weights
        self._attempt += 1
        self._crew, self._dealer, self._stopped, self._losses = Crew(), None, False, []
        # Blocks of unfinished responses may be gone with a machine; a response begins anew with the same draws.
        self._begun = {}

    async def finish(self) -> None:
        """Sample until the batch is complete; RunError where the servers leave some of it out.

        WorkerLostError, that names all of them, where servers were lost before; then nothing is under way any more.
        """
        ledger, groups = self._books.ledger, list(self._left)
        size = helping(await self._appetite(), len(groups), ledger.group_size, len(self._servers))
        if not self._stopped:
            self._dealer = Dealer(groups, len(self._servers), size)
            self._deal(self._dealer)
        await self._crew.finish()
        if not ledger.complete(self._task.name):
            if self._losses:
                first = self._losses[0]
                first.lost = tuple(dict.fromkeys(name for loss in self._losses for name in loss.lost))
                raise first
            missing = f"{len(self._left)} of {len(self._groups)} prompts"
            raise RunError(
                f"{self._task.engine} has ended the responses to {missing} early, though nobody had asked it to",
                node=f"{self._task.name} (step {self._run.step})",
            )
        if self._needed < len(self._groups):
            self._books.record.count("rollout/aborted_prompts", len(self._left))
            self._books.record.count("rollout/aborted_tokens", self._aborted_tokens)

    def lose(self, loss: WorkerLostError) -> None:
        """A server was lost in the sync behind which this run stands: it ends as if its share had failed."""
        self._losses.append(loss)
        if not self._stopped:
            self._stop()

    def left(self) -> list[tuple[int, Begun | None]]:
        """Prompts that did not become part of the batch: their places in the data set, and what there is of each."""
        return [(self._books.ledger.position(group), self._begun.get(group)) for group in self._left]

    async def _appetite(self) -> Appetite:
        """What a server wants: asked once, as all that it depends on stays, and each answer takes a moment."""
        appetites, asked = self._books.appetites, (str(self._task.engine), self._longest())
        if asked not in appetites:
            what = f"{self._task.engine} to say how much it takes at a time"
            appetites[asked] = await self._fleet.call(self._servers[0], "appetite", self._longest(), waits_for=what)
        return appetites[asked]

    def _longest(self) -> int:
        """Tokens of the longest prompt and response."""
        sampling = self._node.sampling if self._training else self._node.val_sampling or self._node.sampling
        return (self._node.max_prompt_tokens or self._pipeline.data.max_prompt_tokens) + sampling.max_new_tokens

    # -- out

    def _deal(self, dealer: Dealer) -> None:
        for server, groups in dealer.deal():
            self._crew.start(self._outlived(self._follow(dealer, server, groups)))

    def _stop(self) -> None:
        """There is enough: end what is still being sampled."""
        self._stopped = True
        if self._dealer is not None:
            self._dealer.stop()
        for member in self._servers:
            self._crew.start(self._outlived(self._abort(member)))

    async def _abort(self, member: Member) -> None:
        what = f"{member.name} to abort what {self._task.name} no longer needs"
        run = (self._run.step, self._task.name, self._run.round, self._attempt)
        await self._fleet.call(member, "abort", *run, waits_for=what)

    async def _outlived(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait for a server. Where it is lost, the others come to an end in good order before anybody hears of it."""
        try:
            await waiting
        except WorkerLostError as loss:
            if not loss.lost:
                raise
            self.lose(loss)

    async def _follow(self, dealer: Dealer, server: int, groups: Sequence[int]) -> None:
        """Have a server sample these groups."""
        member, books = self._servers[server], self._books
        work = portion(
            self._run, self._task, books.ledger, self._pipeline, groups, committed=self._committed, begun=self._begun
        )
        work = replace(work, attempt=self._attempt, weights=self._weights, gather_s=gathering_s(len(self._servers)))
        in_hand, begun = len(groups), False
        async for message in self._fleet.stream(member, work, books.record.went_through):
            self._start = self._start or time.time()
            if isinstance(message, Beat):
                self._tokens += message.sampled_tokens - books.sampled.get(member.name, 0)
                books.sampled[member.name] = message.sampled_tokens
                if not begun:
                    begun = True
                    dealer.begun(server)
                    self._deal(dealer)
            elif message.unfinished:
                self._note_unfinished(message, member)
            else:
                finished = self._note_finished(message, member)
                in_hand -= finished
                dealer.finished(server, finished)
                self._deal(dealer)
            self._tell()
        dealer.over(server, in_hand)
        self._deal(dealer)

    # -- in

    def _note_finished(self, block: Block, member: Member) -> int:
        """Take note of groups that are there; returns how many they are."""
        ledger = self._books.ledger
        arrival = ledger.arrived(self._task.name, block.rows)
        ledger.add(self._task.name, block)
        self._books.record.note(self._run, replace(block, shards=arrival.shards), member.name)
        groups = np.unique(ledger.groups(block.rows)).tolist()
        for group in set(groups) - set(arrival.surplus):
            del self._left[group]
            self._begun.pop(group, None)
        if arrival.surplus and block.tokens is not None:
            self._aborted_tokens += int(block.tokens[np.isin(ledger.groups(block.rows), arrival.surplus)].sum())
        self._keep(block, arrival.surplus)
        complete = ledger.complete(self._task.name)
        if arrival.complete:
            # After what else has come with it, which may be the rest.
            asyncio.get_running_loop().call_soon(self._tell_of, arrival.complete)
        if complete and self._left and not self._stopped:
            self._stop()
        return len(groups)

    def _tell_of(self, shards: Sequence[int]) -> None:
        """Tell of shards that are complete, where the end of the run does not do so in a moment."""
        # Told before that, the trainer would begin with the last shard, and the servers wait for it, though all that
        # they need are weights. A round is over when nothing of it can come.
        ends = self._books.ledger.complete(self._task.name) and (not self._left or self._task.in_rounds)
        for shard in () if ends else shards:
            self._books.shard_done(shard)

    def _note_unfinished(self, block: Block, member: Member) -> None:
        self._books.record.note(self._run, replace(block, shards=()), member.name)
        self._aborted_tokens += block.effort.tokens if block.effort else 0
        self._keep(block, np.unique(self._books.ledger.groups(block.rows)).tolist())

    def _keep(self, block: Block, groups: Sequence[int]) -> None:
        """Keep what a block holds of groups that are not part of the batch, if they are to be gone on with."""
        if block.ref is not None and self._node.partial_rollout:
            self._begun |= {group: Begun(block.ref, self._books.ledger.rows_of((group,))) for group in groups}

    def _tell(self) -> None:
        done, seconds = len(self._groups) - len(self._left), time.time() - (self._start or time.time())
        self._books.progress(Progress(self._task.name, self._run.step, done, self._needed, self._tokens, seconds))
