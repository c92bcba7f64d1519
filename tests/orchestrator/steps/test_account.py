"""Each sample has one outcome, in samples and in tokens, whether or not its step finishes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.config.schema import Scope
from dagrl.ops.work import Carried
from dagrl.orchestrator.steps.account import RolloutFacts, StepAccount
from dagrl.orchestrator.steps.prompt_feed import PartialRolloutBuffer
from dagrl.scheduler.plan import PlannedTask, Rows
from dagrl.tracking.metrics_file import ENDS
from dagrl.workers.messages import Block

UPDATE = PlannedTask("update", "update", "update", "policy", Scope.BATCH, Rows.TRAIN, sampled_by="rollout")
OTHER = replace(UPDATE, name="other")


def account(group_size: int = 2, **facts: object) -> StepAccount:
    return StepAccount(group_size, {"rollout": RolloutFacts(**facts)})


def add(step: StepAccount, rows: list[int], *, finished: bool = True, **counts: list[int]) -> None:
    arrays = {name: np.array(values) for name, values in counts.items()}
    arrays.setdefault("begun", np.zeros(len(rows), int))
    step.rollout("rollout").add(np.array(rows), arrays, finished=finished)


def update(step: StepAccount, rows: list[int], **counts: list[int]) -> None:
    arrays = {name: np.array(values) for name, values in counts.items()}
    step.add_update(UPDATE, Block(np.array(rows), None, None, 0, 1, counts=arrays))


def ends(step: StepAccount, *batch: int) -> dict[str, tuple[int, int]]:
    """Samples and tokens, without zeros; they add up."""
    metrics = step.metrics(batch)
    names = ("generated", *ENDS, "carried_in", "carried_out")
    found = {name: (metrics.get(f"samples/{name}", 0), metrics.get(f"tokens/{name}", 0)) for name in names}
    came, went = ("generated", "carried_in"), (*ENDS, "carried_out")
    for part in (0, 1):
        assert sum(found[name][part] for name in came) == sum(found[name][part] for name in went)
    return {name: counts for name, counts in found.items() if any(counts)}


def test_samples_of_the_batch_are_trained_and_others_unused() -> None:
    step = account()
    add(step, [0, 1, 4, 5], sampled=[3, 4, 5, 6])
    add(step, [2, 3], sampled=[2, 0], finished=False)
    assert ends(step, 0) == {"generated": (5, 20), "trained": (2, 7), "unused": (3, 13)}


def test_groups_that_do_not_pass_are_filtered() -> None:
    step = account()
    add(step, [0, 1, 2, 3], sampled=[3, 4, 5, 6])
    step.end([1], "filtered")
    assert ends(step, 0) == {"generated": (4, 18), "trained": (2, 7), "filtered": (2, 11)}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"stale": [2, 0], "kept": [1, 3]}, {"trained": (2, 4), "stale": (0, 2)}),
        ({"stale": [3, 0], "kept": [0, 3]}, {"trained": (1, 3), "stale": (1, 3)}),
        # A node masked a token before: at most the sampled tokens count as too old.
        ({"stale": [2, 0], "kept": [0, 3]}, {"trained": (1, 3), "stale": (1, 3)}),
        ({"stale": [0, 0], "kept": [0, 0]}, {"trained": (2, 6)}),
    ],
)
def test_tokens_that_are_too_old_are_stale_and_samples_without_others(
    counts: Mapping[str, list[int]], expected: dict[str, tuple[int, int]]
) -> None:
    step = account()
    add(step, [0, 1], sampled=[3, 3])
    update(step, [0, 1], **counts)
    assert ends(step, 0) == {"generated": (2, 6)} | expected


def test_pieces_of_an_update_add_up_and_a_sample_is_stale_if_all_updates_find_it_so() -> None:
    step = account()
    add(step, [0, 1], sampled=[3, 3])
    update(step, [0], stale=[3], kept=[0])
    update(step, [1], stale=[3], kept=[0])
    counts = {"stale": np.array([3, 0]), "kept": np.array([0, 3])}
    step.add_update(OTHER, Block(np.array([0, 1]), None, None, 0, 1, counts=counts))
    assert ends(step, 0) == {"generated": (2, 6), "trained": (1, 3), "stale": (1, 3)}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"stale": [3, 3], "kept": [0, 0]}, {"trained": (2, 6)}),
        ({"stale": [3, 1], "kept": [0, 2]}, {"trained": (2, 6)}),
        ({"stale": [0, 0], "kept": [3, 3]}, {"trained": (2, 6)}),
    ],
)
def test_samples_that_are_too_old_for_one_of_two_updates_are_trained(order, counts, expected) -> None:
    step = account()
    add(step, [0, 1], sampled=[3, 3])
    arrays = {name: np.array(values) for name, values in counts.items()}
    blocks = [(UPDATE, arrays), (OTHER, {})]
    for place in order:
        task, mine = blocks[place]
        step.add_update(task, Block(np.array([0, 1]), None, None, 0, 1, counts=mine))
    assert ends(step, 0) == {"generated": (2, 6)} | expected


def test_a_piece_without_stale_rows_keeps_them_and_other_nodes_train_nothing() -> None:
    step = account(rows_per_sample=2, group_size=4)
    add(step, [0, 1, 2, 3], sampled=[3, 1, 3, 1])
    update(step, [0, 2], stale=[3, 3], kept=[0, 0])
    update(step, [1])
    update(step, [3], stale=[1], kept=[0])
    step.add_update(replace(UPDATE, name="values", op="critic", trains=True), Block(np.arange(4), None, None, 0, 1))
    assert ends(step, 0) == {"generated": (2, 8), "trained": (1, 1), "stale": (1, 7)}


def test_a_response_of_several_steps_counts_once() -> None:
    first = account(carries=True)
    add(first, [0, 1], sampled=[5, 0], finished=False)
    first.end([0], "carried_out")
    assert ends(first) == {"generated": (1, 5), "carried_out": (1, 5)}
    second = account(carries=True)
    second.rollout("rollout").carry_in(3, first.rollout("rollout").left(0))
    add(second, [6, 7], sampled=[2, 4], begun=[5, 0])
    assert ends(second, 3) == {"generated": (1, 6), "carried_in": (1, 5), "trained": (2, 11)}


@pytest.mark.parametrize(("outdated", "end"), [(1, "stale"), (0, "failed")])
def test_a_response_that_begins_again_is_another_sample(outdated: int, end: str) -> None:
    step = account(carries=True)
    step.rollout("rollout").carry_in(0, (5, -1))
    add(step, [0, 1], sampled=[2, 4], outdated=[outdated, 0])
    assert ends(step, 0) == {"generated": (2, 6), "carried_in": (1, 5), "trained": (2, 6), end: (1, 5)}


def test_samples_of_a_lost_server_have_failed() -> None:
    step = account()
    rollout = step.rollout("rollout")
    add(step, [4, 5], sampled=[3, 3], finished=False)
    rollout.lose(np.arange(4), 6)
    rollout.restart([2])
    add(step, [0, 1, 2, 3, 4, 5], sampled=[3, 3, 3, 3, 3, 3])
    assert ends(step, 0, 1, 2) == {"generated": (12, 30), "trained": (6, 18), "failed": (6, 12)}


def test_the_rows_of_an_agent_are_one_sample() -> None:
    step = account(4, rows_per_sample=2)
    # Ten tokens of the first are in no row, four are of a failed attempt; the other agent has failed.
    add(step, [0, 1, 2, 3], sampled=[20, 0, 7, 0], held=[6, 0, 7, 0], retried=[4, 0, 0, 0], agent_failed=[0, 0, 1, 0])
    update(step, [0, 1, 2, 3], stale=[1, 1, 0, 0], kept=[2, 2, 0, 0])
    found = {"generated": (2, 27), "trained": (1, 4), "stale": (0, 2), "unused": (0, 10), "failed": (1, 11)}
    assert ends(step, 0) == found


def test_samples_that_an_expert_replaces_or_that_nothing_trains_on_are_unused() -> None:
    step = account(3, replaced=1)
    # The second group is smaller.
    add(step, [0, 1, 2, 3, 4], sampled=[1, 2, 4, 8, 16])
    assert ends(step, 0, 1) == {"generated": (5, 31), "trained": (3, 11), "unused": (2, 20)}
    step = account(trained=False)
    add(step, [0, 1], sampled=[1, 2])
    assert ends(step, 0) == {"generated": (2, 3), "unused": (2, 3)}


def test_sources_add_up() -> None:
    step = StepAccount(2, {"a": RolloutFacts(), "b": RolloutFacts("b/")})
    for name in ("a", "b"):
        step.rollout(name).add(np.arange(4), {"sampled": np.arange(4), "begun": np.zeros(4, int)}, finished=True)
    metrics = step.metrics([0], lambda group: ["math", "code"][group])
    assert metrics["tokens/generated"] == metrics["b/tokens/generated"] == 6
    assert (metrics["train/math/tokens/trained"], metrics["train/code/tokens/unused"]) == (1, 5)
    assert metrics["b/train/math/samples/trained"] == 2
    for name in (name for name in metrics if name.startswith(("samples/", "tokens/"))):
        assert metrics[name] == metrics[f"train/math/{name}"] + metrics[f"train/code/{name}"]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_groups_that_return_from_a_buffer_had_their_end_before(
    returned: list[tuple[int, int]], sampled: list[int]
) -> None:
    def counts(*more: tuple[int, int]) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
        step = account()
        add(step, [0, 1, 2, 3], sampled=sampled)
        stale, kept = zip(*[(0, sampled[0]), (sampled[1], 0), (0, sampled[2]), (0, sampled[3]), *more], strict=True)
        # A buffer numbers the groups that it returns from the step's first unused number on.
        update(step, list(range(4 + len(more))), stale=list(stale), kept=list(kept))
        batch = range(2 + len(more) // 2)
        return step.metrics(batch, lambda group: ["math", "code"][group % 2]), ends(step, *batch)

    assert counts(*returned) == counts()


@dataclass
class Ledger:
    """Every sample by itself: the tokens that were sampled for it, and its end."""

    tokens: dict[int, int] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    open: dict[tuple[int, int], int] = field(default_factory=dict)
    """Prompt and place in its group -> the sample that is being made."""

    def sample(self, key: tuple[int, int], tokens: int, *, finished: bool) -> None:
        if key not in self.open and (tokens or finished):
            self.open[key] = len(self.tokens)
            self.tokens[self.open[key]] = 0
        if key in self.open:
            self.tokens[self.open[key]] += tokens

    def end(self, key: tuple[int, int], end: str) -> None:
        if key in self.open:
            self.ends[self.open.pop(key)] = end

    def totals(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for sample, tokens in self.tokens.items():
            end = self.ends.get(sample, "open")
            counted[f"samples/{end}"] += 1
            counted[f"tokens/{end}"] += tokens
        return counted


@settings(deadline=None)
@given(
    needed=st.integers(1, 3),
    more=st.integers(0, 3),
    size=st.integers(1, 3),
    ahead=st.integers(0, 2),
    rounds=st.integers(1, 3),
    partial=st.booleans(),
    draw=st.data(),
)
def test_every_sample_has_the_end_that_a_ledger_of_single_samples_gives_it(
    needed: int, more: int, size: int, ahead: int, rounds: int, partial: bool, draw
) -> None:
    """Steps overlap, sample in rounds, lose servers, restart from a checkpoint, and find samples too old."""
    buffer, ledger, sums = PartialRolloutBuffer(), Ledger(), Counter[str]()
    position, steps = 0, 5
    open_steps: list[tuple[int, StepAccount, list[int]]] = []

    def sampled(step: int) -> tuple[int, StepAccount, list[int]]:
        nonlocal position
        account = StepAccount(size, {"rollout": RolloutFacts(carries=partial)})
        rollout, batch, group = account.rollout("rollout"), list[int](), 0
        for round_ in range(rounds):
            mine = list(buffer.take(step, needed + more, round_))
            taken = buffer.taken(step, round_)
            begun = {each.prompt: each.begun for each in taken if each.begun is not None}
            carried = {each.prompt: each.sampled for each in taken}
            mine += range(position, position + needed + more - len(mine))
            position = max(position, *(prompt + 1 for prompt in mine))
            groups = {prompt: group + place for place, prompt in enumerate(mine)}
            group += len(mine)
            for prompt in mine:
                if carried.get(prompt):
                    rollout.carry_in(groups[prompt], carried[prompt])
            done = draw.draw(st.permutations(mine))[:needed]
            if draw.draw(st.integers(0, 3)) == 0:
                lost = draw.draw(st.integers(0, 9))
                keys = [(prompt, place) for prompt in mine for place in range(size)]
                shares = [lost // len(keys) + (number < lost % len(keys)) for number in range(len(keys))]
                if lost:
                    for key, share in zip(keys, shares, strict=True):
                        ledger.sample(key, share, finished=False)
                        ledger.end(key, "failed")
                rows = np.concatenate([groups[prompt] * size + np.arange(size) for prompt in mine])
                rollout.lose(rows, lost)
                rollout.restart([groups[prompt] for prompt in mine])
                for key in keys:
                    ledger.end(key, "failed")
                begun = {}
            for prompt in mine:
                finished = prompt in done
                new = draw.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
                keeps = prompt in begun and draw.draw(st.booleans())
                outdated = prompt in begun and not keeps
                kept = [
                    max(0, ledger.tokens[ledger.open[prompt, place]]) if keeps and (prompt, place) in ledger.open else 0
                    for place in range(size)
                ]
                for place, tokens in enumerate(new):
                    if not kept[place]:
                        ledger.end((prompt, place), "stale" if outdated else "failed")
                    ledger.sample((prompt, place), tokens, finished=finished)
                counts = {"sampled": new, "begun": kept, "outdated": [outdated] * size}
                rows = groups[prompt] * size + np.arange(size)
                rollout.add(rows, {name: np.array(each, int) for name, each in counts.items()}, finished=finished)
            left = [prompt for prompt in mine if prompt not in done]
            if partial:
                account.end([groups[prompt] for prompt in left], "carried_out")
                buffer.add(step, [Carried(prompt, "ref", rollout.left(groups[prompt])) for prompt in left])
            passed = draw.draw(st.lists(st.sampled_from(done), unique=True)) if rounds > 1 else done
            for prompt in done:
                if prompt not in passed:
                    account.end([groups[prompt]], "filtered")
                    end = "filtered"
                elif len(batch) < needed:
                    batch.append(groups[prompt])
                    end = "trained"
                else:
                    end = "unused"
                stale = draw.draw(st.booleans()) if end == "trained" else False
                for place in range(size):
                    tokens = ledger.tokens[ledger.open[prompt, place]]
                    if stale:
                        update(account, [groups[prompt] * size + place], stale=[tokens], kept=[0])
                    ledger.end((prompt, place), "stale" if stale and tokens else end)
            for prompt in left:
                for place in range(size):
                    if not partial:
                        ledger.end((prompt, place), "unused")
        return step, account, batch

    for step in range(1, steps + ahead + 1):
        if step <= steps:
            open_steps.append(sampled(step))
        if step > ahead:
            done, finished, batch = open_steps.pop(0)
            metrics = finished.metrics(batch)
            ends(finished, *batch)
            sums.update({name: int(value) for name, value in metrics.items()})
            buffer.commit(done)
            if draw.draw(st.integers(0, 4)) == 0 and not open_steps:
                # A resumed run has the prompts, and not their tokens.
                buffer = PartialRolloutBuffer(buffer.after(done))
                buffer.drop_tokens()
    totals = ledger.totals()
    for unit in ("samples", "tokens"):
        for end in ENDS:
            assert sums[f"{unit}/{end}"] == totals[f"{unit}/{end}"], (unit, end)
        left = sums[f"{unit}/carried_out"] - sums[f"{unit}/carried_in"]
        assert left == totals[f"{unit}/open"]
    assert sums["samples/generated"] == len(ledger.tokens)
    assert sums["tokens/generated"] == sum(ledger.tokens.values())
