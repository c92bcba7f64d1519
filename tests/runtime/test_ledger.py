"""The ledger: which block holds which rows."""

from __future__ import annotations

import numpy as np

from dagrl.plan.plan import HOST, PlannedTask, Rows
from dagrl.runtime.ledger import Ledger
from dagrl.runtime.messages import Block, Span
from dagrl.spec.ops import Scope

SPAN = Span(0.0, 1.0)


def block(rows, ref="ref", tokens=None, shards=()):
    return Block(np.asarray(rows), ref, None if tokens is None else np.asarray(tokens), SPAN, shards)


def ledger_of_two_shards() -> Ledger:
    ledger = Ledger(group_size=2, shards=2)
    ledger.add_source("prompts", block([2, 3], "p1", [5, 5], shards=(1,)))
    ledger.add_source("prompts", block([0, 1], "p0", [3, 3], shards=(0,)))
    return ledger


def test_rows_come_by_shard_whatever_the_order_of_arrival():
    ledger = ledger_of_two_shards()
    assert ledger.rows((0, 1)).tolist() == [0, 1, 2, 3]
    assert ledger.groups(ledger.rows((0, 1))).tolist() == [0, 0, 1, 1]


def test_tokens_of_a_row_add_up_over_the_blocks_that_bring_some():
    ledger = ledger_of_two_shards()
    ledger.add("rollout", block([3, 0], tokens=[7, 1]))
    assert ledger.tokens(np.array([0, 1, 2, 3])).tolist() == [4, 3, 5, 12]
    assert ledger.total_tokens == 24


def test_a_shard_has_arrived_when_all_its_rows_have():
    ledger = ledger_of_two_shards()
    assert ledger.arrived("rollout", block([1], shards=(0,))) == []
    assert ledger.arrived("rollout", block([2, 3], shards=(1,))) == [1]
    assert ledger.arrived("rollout", block([0], shards=(0,))) == [0]


def test_sources_name_each_producers_blocks_once_with_the_columns_wanted_of_it():
    ledger = ledger_of_two_shards()
    ledger.add("rollout", block([3, 1, 0], "r0"))
    ledger.add("rollout", block([2], "r1"))
    inputs = {
        "prompt_tokens": ("prompts", "prompt_tokens"),
        "answer": ("prompts", "answer"),
        "tokens": ("rollout", "response_tokens"),
    }
    task = PlannedTask("reward", "reward", "reward", HOST, Scope.ROW, Rows.TRAIN, inputs=inputs)
    found = {source.ref: source for source in ledger.sources(task, np.array([2, 3]))}
    assert set(found) == {"p1", "r0", "r1"}
    assert found["p1"].positions is None
    assert found["p1"].columns == {"prompt_tokens": "prompt_tokens", "answer": "answer"}
    assert found["r0"].positions.tolist() == [0]
    assert found["r1"].columns == {"tokens": "response_tokens"}


def test_a_rank_without_rows_still_gets_the_columns():
    ledger = ledger_of_two_shards()
    inputs = {"prompt_tokens": ("prompts", "prompt_tokens")}
    task = PlannedTask("ref", "ref", "logprob", "actor", Scope.ROW, Rows.TRAIN, inputs=inputs)
    (source,) = ledger.sources(task, np.zeros(0, dtype=np.int64))
    assert len(source.positions) == 0
