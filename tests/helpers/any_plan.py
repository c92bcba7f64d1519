"""Random plans: policies with their generators, critics and updates, frozen engines, filters; and who reads whom."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import networkx as nx
from hypothesis import strategies as st
from plan_parts import ONE_RANK, executor, for_validation, task

from dagrl.config.schema import Scope
from dagrl.scheduler.plan import HOST, Executor, Plan, PlannedTask


@st.composite
def plans(draw) -> Plan:
    """Up to three policies with their generators and critics, and up to two frozen engines, on up to four groups."""
    groups = st.sampled_from(draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]])))
    pairs, frozen = draw(st.sampled_from([1, 1, 2, 2, 3])), draw(st.integers(0, 2))
    executors = [Executor(HOST, None, ONE_RANK * draw(st.integers(1, 2)))]
    tasks = [task("prompts", HOST, scope=Scope.BATCH)]
    told: list[str] = []
    for pair in range(pairs):
        actor, generator = f"actor{pair}", f"generator{pair}"
        executors.append(executor(actor, draw(groups), trained=True, sleeps=draw(st.booleans())))
        executors.append(executor(generator, draw(groups), weights_from=actor, sleeps=draw(st.booleans())))
        # A further policy answers an earlier one, or the prompts.
        asked = draw(st.sampled_from(["prompts", *told]))
        rollout = f"rollout{pair}"
        tasks.append(task(rollout, generator, asked, streams=True, generates=True))
        tasks.append(task(f"reward{pair}", HOST, rollout))
        told.append(rollout)
        needs = [f"reward{pair}"]
        if draw(st.booleans()):
            tasks.append(task(f"old{pair}", actor, rollout))
            needs.append(f"old{pair}")
        if pair < frozen:
            reference = f"reference{pair}"
            executors.append(executor(reference, draw(groups), sleeps=draw(st.booleans())))
            tasks.append(task(f"ref{pair}", reference, draw(st.sampled_from(told))))
            needs.append(f"ref{pair}")
        needs += draw(_others(tasks, executors, pair))
        has_critic = draw(st.booleans())
        if has_critic:
            critic = f"critic{pair}"
            executors.append(executor(critic, draw(groups), trained=True, sleeps=draw(st.booleans())))
            tasks.append(task(f"values{pair}", critic, rollout))
            needs.append(f"values{pair}")
        tasks.append(task(f"advantage{pair}", HOST, *needs, scope=Scope.GROUP))
        trains_on = f"advantage{pair}"
        if draw(st.integers(0, 3)) == 0:
            trains_on = f"buffer{pair}"
            tasks.append(task(trains_on, HOST, f"advantage{pair}", scope=Scope.BATCH, replays=True))
        if has_critic:
            tasks.append(task(f"critic_update{pair}", critic, trains_on, scope=Scope.BATCH, trains=True))
        tasks.append(task(f"update{pair}", actor, trains_on, scope=Scope.BATCH, trains=True))
    validation = for_validation(
        tasks, "prompts", *told, *(f"{name}{pair}" for name in ("reward", "old") for pair in range(pairs))
    )
    if draw(st.booleans()):
        tasks = draw(_with_a_filter(tasks, f"reward{draw(st.integers(0, pairs - 1))}"))
    alone = {each.name for each in executors if sum(other.group == each.group for other in executors) == 1}
    executors = [replace(each, sleeps=each.sleeps and each.name not in alone) for each in executors]
    shards = draw(st.integers(1, 4))
    return Plan(
        {each.name: each for each in executors},
        (*(_in_pieces(each, tasks, executors, draw(_cuts(shards))) for each in tasks), *validation),
        shards=shards,
        steps=draw(st.sampled_from([1, 2, 3, 4, 5, 10])),
        max_staleness=draw(st.sampled_from([0, 0, 1, 2, 3, 8])),
        in_flight=draw(st.booleans()),
        validate_every=draw(st.sampled_from([None, 1, 2])),
        validate_first=draw(st.booleans()),
        save_every=draw(st.sampled_from([None, 1, 2])),
    )


@st.composite
def _others(draw, tasks: list[PlannedTask], executors: list[Executor], pair: int) -> list[str]:
    """Puts up to two tasks more behind any of `tasks`; returns those that the update is to wait for."""
    waited_for = []
    for number in range(draw(st.integers(0, 2))):
        name = f"other{pair}{number}"
        # On a generator: a judge that follows the policy.
        where = draw(st.sampled_from(executors))
        read = draw(st.lists(st.sampled_from([each.name for each in tasks if not each.trains]), min_size=1, max_size=3))
        tasks.append(
            task(
                name,
                where.name,
                *dict.fromkeys(read),
                scope=draw(st.sampled_from([Scope.ROW, Scope.BATCH])),
                frozen=where.trained and draw(st.booleans()),
            )
        )
        if draw(st.booleans()):
            waited_for.append(name)
    return waited_for


@st.composite
def _with_a_filter(draw, tasks: list[PlannedTask], metric: str) -> list[PlannedTask]:
    """The tasks and a filter that looks at `metric`, and at what else it may: with all before it, it runs in rounds."""
    others = st.lists(st.sampled_from([each.name for each in tasks if not each.trains]), max_size=1)
    chooser = task("filter", HOST, *dict.fromkeys([metric, *draw(others)]), scope=Scope.BATCH, selects=True)
    tasks = [*tasks, chooser]
    graph = nx.DiGraph((need, reader.name) for reader in tasks for need in reader.needs)
    in_rounds = {"filter", *nx.ancestors(graph, "filter")}
    return [replace(each, in_rounds=each.name in in_rounds) for each in tasks]


@st.composite
def _cuts(draw, shards: int) -> tuple[tuple[int, ...], ...]:
    """A batch in pieces, or nothing."""
    if draw(st.booleans()):
        return ()
    order = draw(st.permutations(range(shards)))
    borders = sorted({0, shards, *draw(st.lists(st.integers(0, shards), max_size=2))})
    return tuple(tuple(order[begin:end]) for begin, end in pairwise(borders))


def _in_pieces(
    each: PlannedTask, tasks: list[PlannedTask], executors: list[Executor], pieces: tuple[tuple[int, ...], ...]
) -> PlannedTask:
    """A batch task with its pieces, where it may have some: nothing that an update waits for needs trained weights."""
    if each.scope is not Scope.BATCH or not each.needs or each.selects or each.replays:
        return each
    graph = nx.DiGraph((need, reader.name) for reader in tasks for need in reader.needs)
    trained = {executor.name for executor in executors if executor.trained}
    before = [other for other in tasks if other.name in nx.ancestors(graph, each.name)]
    if each.trains and any(other.executor in trained and not other.frozen for other in before):
        return each
    return replace(each, pieces=pieces)
