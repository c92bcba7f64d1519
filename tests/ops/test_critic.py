"""Values and critic: what reaches the engine, and what is told of it; GAE between the two; the policy's warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from work import changed

from dagrl.algorithms.token_returns import gae_advantages
from dagrl.algorithms.value_loss import ValueObjective
from dagrl.data.batch import Batch, Column
from dagrl.data.stats import Stat
from dagrl.ops.advantage import advantage
from dagrl.ops.base import OpInput
from dagrl.ops.critic import critic
from dagrl.ops.update import update
from dagrl.ops.values import values


class Critic:
    """Expects the length of what is left; notes what it is told to train on."""

    policy_version = 3

    def values(self, batch: Batch, *, tokens_per_micro_batch: int) -> Column:
        self.tokens_per_micro_batch = tokens_per_micro_batch
        return Column.ragged([np.arange(length, 0, -1) for length in batch["response_tokens"].lengths], "float32")

    def update(
        self,
        mini_batches: Sequence[Batch],
        objective: Any,
        *,
        tokens_per_micro_batch: int,
        begins: bool = True,
        ends: bool = True,
    ) -> dict[str, Stat]:
        self.trained_on = [batch.rows.tolist() for batch in mini_batches]
        self.objective, self.tokens_per_micro_batch, self.part = objective, tokens_per_micro_batch, (begins, ends)
        self.policy_version += ends
        told = {"critic/loss": Stat.of([0.5]), "lr": Stat.of([1e-3]), "grad_norm": Stat.of([2.0])}
        return told | {"critic/return": Stat.of([0.0, 2.0]), "critic/error_before": Stat.of([0.0, 1.0])}


ENGINES = {"value": {"backend": "megatron", "group": "train", "head": "value", "optimizer": {"lr": 1e-3}}}


def nodes(**options: Any) -> dict[str, Any]:
    return {
        "values": {"op": "values", "engine": "value", "tokens_per_micro_batch": 55},
        "learn": {"op": "critic", "engine": "value", **options},
    }


def test_each_shard_gets_its_values(bench) -> None:
    engine = Critic()
    parts = [
        OpInput(1, bench.batch([2, 3], prompt_tokens=["1+1=", "1="], response_tokens=["2", "345"])),
        OpInput(4, bench.batch([], prompt_tokens=[], response_tokens=[])),
    ]
    first, empty = values(parts, bench.context("values", engine=engine, engines=ENGINES, nodes=nodes()))
    assert (first.shards, first.rows.tolist()) == ((1,), [2, 3])
    assert first.columns["value"].values.tolist() == [1, 3, 2, 1]
    assert first.stats["values/mean"].mean == 1.75
    assert (empty.shards, len(empty.columns["value"])) == ((4,), 0)
    assert engine.tokens_per_micro_batch == 55


def test_a_critic_takes_mini_batches_in_order_once_an_epoch(bench) -> None:
    engine = Critic()
    parts = [OpInput(index, bench.batch(rows)) for index, rows in enumerate(([0, 3], [], [5]))]
    options = nodes(epochs=2, tokens_per_micro_batch=77, cliprange_value=0.25, aggregation="seq-mean-token-sum")
    context = bench.context("learn", engine=engine, engines=ENGINES, nodes=options)
    (output,) = critic(parts, changed(context, ends=False))
    assert engine.trained_on == [[0, 3], [], [5], [0, 3], [], [5]]
    assert (engine.tokens_per_micro_batch, engine.part) == (77, (True, False))
    assert isinstance(engine.objective, ValueObjective)
    assert (engine.objective.cliprange, engine.objective.aggregation) == (0.25, "seq-mean-token-sum")
    assert (output.shards, output.rows.tolist(), output.columns) == ((), [0, 3, 5], {})
    # What a policy's update tells under the same names is not mixed up with it.
    assert {name: stat.mean for name, stat in output.stats.items()} == {
        "critic/loss": 0.5,
        "critic/lr": 1e-3,
        "critic/grad_norm": 2.0,
        "critic/explained_variance": 0.75,
    }


def gae(**options: Any) -> dict[str, Any]:
    return {"advantage": {"op": "advantage", "estimator": "gae", **options}}


@pytest.fixture
def part(bench) -> OpInput:
    """Responses of three, two and two tokens, the middle one's last not the policy's."""
    return OpInput(
        0,
        bench.batch(
            [4, 5, 6],
            reward=[1, 2, -1],
            response_mask=[[1, 1, 1], [1, 0], [1, 1]],
            value=[[0.5, 0.25, 0.75], [1.5, 9], [0, -0.5]],
            token_reward=[[0.5, 0, 0], [0, 0], [0, 0]],
            old_logprob=[[-1, -1, -1], [-2, -1], [-1, -1]],
            ref_logprob=[[-1, -2, -1], [-1, -1], [-1, -1]],
        ),
    )


def test_advantages_are_whitened_and_returns_are_not(bench, part) -> None:
    plain = OpInput(0, Batch(part.batch.rows, {k: v for k, v in part.batch.columns.items() if k != "token_reward"}))
    (output,) = advantage([plain], bench.context("advantage", nodes=gae(gamma=0.5, lam=0.5)))
    # By hand: steps -0.375, 0.125, 0.25 in the first, each with a quarter of what follows; 0.5; -0.25 and -0.5.
    raw = np.array([-0.375 + 0.25 * (0.125 + 0.0625), 0.125 + 0.0625, 0.25, 0.5, -0.25 - 0.125, -0.5])
    counted = [0, 1, 2, 3, 5, 6]
    found = output.columns["advantage"].values
    assert found[counted].tolist() == pytest.approx(((raw - raw.mean()) / raw.std(ddof=1)).tolist(), rel=1e-6)
    assert found[4] == 0
    returns = output.columns["return"].values
    expected = raw + np.array([0.5, 0.25, 0.75, 1.5, 0, -0.5])
    assert returns[counted].tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert output.stats["returns/mean"].mean == pytest.approx(expected.mean(), rel=1e-6)


def test_rewards_of_turns_and_the_divergence_are_charged_where_they_arise(bench, part) -> None:
    options = gae(lam=0.0, kl_in_reward={"coef": 0.5})
    (output,) = advantage([part], bench.context("advantage", nodes=options))
    # The first response's 1 is 0.5 on its first token, and the rest on its last; k1 charges its second 0.5 * 1, and the
    # second response's first 0.5 * -1.
    rewards = Column.ragged([[0.5, -0.5, 0.5], [2.5, 0], [0, -1]], "float32")
    mask, value = part.batch["response_mask"], part.batch["value"]
    _, returns = gae_advantages(rewards, value, mask, trace=0.0)
    assert output.columns["return"].values.tolist() == returns.values.tolist()
    assert output.stats["kl/in_reward"].total == pytest.approx(0.5 * (1 - 1))


@pytest.mark.parametrize(("step", "trained_on"), [(1, []), (2, []), (3, [[0]])])
def test_a_policy_waits_while_its_critic_warms_up(bench, step, trained_on) -> None:
    engine = Critic()
    part = OpInput(0, bench.batch([0], policy_version=[3], advantage=[[1]], response_mask=[[1]]))
    waiting = {"update": {"op": "update", "engine": "actor", "critic_warmup": 2}}
    (output,) = update([part], bench.context("update", step=step, engine=engine, nodes=waiting))
    assert engine.trained_on == trained_on
    assert engine.policy_version == 4
    assert ("lr" in output.stats) == bool(trained_on)
    assert output.stats["staleness"].mean == 0
