from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.data.batch import Batch
from dagrl.data.stats import merge

# A large epsilon: with Adam's own, a gradient of nearly 0 gives a step of full size and of chance direction.
ADAM = {"lr": 1e-2, "adam_eps": 1e-2}
TP2 = {"tensor_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def mini_batches(batch: Batch, count: int = 2) -> list[Batch]:
    """This rank's rows of each mini-batch: of the first one, the last data-parallel rank has none."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    whole = [np.arange(first, len(batch), count) for first in range(count)]
    mine = [rows[rank::size] for rows in whole]
    if size > 1:
        mine[0] = whole[0][rank :: size - 1] if rank < size - 1 else whole[0][:0]
    return [batch.take(rows) for rows in mine]


def weights(engine: Any) -> dict[str, np.ndarray]:
    return {name: tensor.clone().numpy() for bucket in engine.export_weights(1 << 20) for name, tensor in bucket}


def largest_difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    assert left.keys() == right.keys() and left
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)


def means(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: stat.mean for name, stat in metrics.items()}


@pytest.fixture(scope="module")
def train(run_engine: Callable[..., list[Any]], samples: Batch, objective: Any) -> Callable[..., Any]:
    """``train(world_size, **spec)``: weights before and after two updates of two mini-batches, and their metrics."""

    def on_rank(engine: Any) -> dict[str, Any]:
        before = weights(engine)
        metrics = [means(engine.update(mini_batches(samples), objective, tokens_per_micro_batch=40)) for _ in range(2)]
        return {"before": before, "after": weights(engine), "metrics": metrics, "version": engine.policy_version}

    def run(world_size: int, **fields: Any) -> dict[str, Any]:
        ranks = run_engine(world_size, on_rank, **{"optimizer": ADAM, **fields})
        assert all(rank["metrics"] == ranks[0]["metrics"] for rank in ranks), "metrics are the same on every rank"
        return ranks[0]

    return run


@pytest.fixture(scope="module")
def one_process(train: Callable[..., Any]) -> dict[str, Any]:
    return train(1, optimizer={**ADAM, "use_distributed_optimizer": False})


@pytest.mark.parametrize(
    ("world_size", "fields"),
    [
        pytest.param(1, {}, id="distributed optimizer"),
        pytest.param(2, {}, id="dp2, distributed optimizer"),
        pytest.param(2, {"optimizer": {**ADAM, "use_distributed_optimizer": False}}, id="dp2, plain optimizer"),
        pytest.param(2, {"ddp": OVERLAP}, id="dp2, overlap"),
        # The output layer, which megatron does not call itself, is in a bucket of its own.
        pytest.param(2, {"ddp": OVERLAP | {"bucket_size": 1000}}, id="dp2, overlap in several buckets"),
        pytest.param(2, {"parallel": TP2}, id="tp2"),
        pytest.param(4, {"parallel": {**TP2, "sequence_parallel": True}}, id="dp2 x tp2, sequence parallel"),
        pytest.param(
            1,
            {
                "transformer": {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                }
            },
            id="recompute",
        ),
    ],
)
def test_every_layout_trains_to_the_same_weights(train, one_process, world_size: int, fields: dict[str, Any]) -> None:
    trained = train(world_size, **fields)
    moved = largest_difference(one_process["after"], one_process["before"])
    assert largest_difference(trained["before"], one_process["before"]) == 0
    assert largest_difference(trained["after"], one_process["after"]) < 1e-4 * moved
    for metrics, expected in zip(trained["metrics"], one_process["metrics"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_mini_batch_by_mini_batch_an_update_is_the_same_to_the_last_digit(
    run_engine: Callable[..., list[Any]], samples: Batch, objective: Any, world_size: int
) -> None:
    """And the rate moves once a step, and so does the version."""
    warming = {"optimizer": ADAM, "lr_schedule": {"lr_warmup_steps": 3}}

    def at_once(engine: Any) -> Any:
        steps = [engine.update(mini_batches(samples), objective, tokens_per_micro_batch=40) for _ in range(2)]
        return steps, engine.policy_version, weights(engine)

    def in_pieces(engine: Any) -> Any:
        steps, versions = [], []
        for _ in range(2):
            told = []
            for begins, batch in zip((True, False), mini_batches(samples), strict=True):
                part = {"begins": begins, "ends": not begins}
                told.append(engine.update([batch], objective, tokens_per_micro_batch=40, **part))
                versions.append(engine.policy_version)
            steps.append(merge(told))
        assert versions == [0, 1, 1, 2]
        return steps, engine.policy_version, weights(engine)

    expected, *_ = run_engine(world_size, at_once, **warming)
    told, *_ = run_engine(world_size, in_pieces, **warming)
    # Metrics are added up over replicas and mini-batches, here in another order.
    for step, wanted in zip(told[0], expected[0], strict=True):
        assert means(step) == pytest.approx(means(wanted), rel=1e-14)
    assert told[1] == expected[1] == 2
    assert largest_difference(told[2], expected[2]) == 0


def test_an_update_counts_one_version_and_reports_norm_and_rate(one_process) -> None:
    assert one_process["version"] == 2
    for metrics in one_process["metrics"]:
        assert metrics.keys() == {"loss", "nll", "grad_norm", "lr"}
        assert metrics["lr"] == ADAM["lr"] and metrics["grad_norm"] > 0
    assert one_process["metrics"][1]["loss"] < one_process["metrics"][0]["loss"]


def test_a_clipped_step_is_as_long_as_the_bound_says(run_engine, samples: Batch, objective: Any) -> None:
    sgd = {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "weight_decay": 0.0, "use_distributed_optimizer": False}

    def on_rank(engine: Any) -> tuple[float, float]:
        before = weights(engine)
        metrics = engine.update(mini_batches(samples, 1), objective, tokens_per_micro_batch=40)
        after = weights(engine)
        squares = sum(float(np.square(after[name].astype("f8") - before[name]).sum()) for name in before)
        return metrics["grad_norm"].mean, squares**0.5

    norm, step = run_engine(1, on_rank, optimizer={**sgd, "clip_grad": 0.0})[0]
    clipped_norm, clipped_step = run_engine(2, on_rank, optimizer={**sgd, "clip_grad": 0.02}, parallel=TP2)[0]
    assert step == pytest.approx(0.5 * norm, rel=1e-4) and norm > 0.02
    assert clipped_norm == pytest.approx(norm, rel=1e-5), "the norm is reported before clipping"
    assert clipped_step == pytest.approx(0.5 * 0.02, rel=1e-3)


def test_start_weights_change_places_and_training_continues_exactly(run_engine, samples: Batch, objective: Any) -> None:
    def on_rank(engine: Any, *, look: bool) -> list[Any]:
        def logprobs() -> np.ndarray:
            return engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=40).values

        results = [logprobs()]
        for _ in range(2):
            results.append(means(engine.update(mini_batches(samples), objective, tokens_per_micro_batch=40)))
            if look:
                trained = weights(engine), logprobs()
                with engine.start_weights():
                    np.testing.assert_array_equal(logprobs(), results[0])
                assert not np.array_equal(trained[1], results[0])
                np.testing.assert_array_equal(logprobs(), trained[1])
                exported = weights(engine)
                assert exported.keys() == trained[0].keys()
                assert all(np.array_equal(exported[name], trained[0][name]) for name in exported)
        return results[1:]

    options = {"optimizer": ADAM, "keep_start_weights": True, "ddp": {"overlap_param_gather": True}}
    looked = run_engine(2, lambda engine: on_rank(engine, look=True), **options)
    assert looked == run_engine(2, lambda engine: on_rank(engine, look=False), **options)


def test_an_engine_that_does_not_train_computes_the_same_log_probs(run_engine, samples: Batch) -> None:
    def on_rank(engine: Any) -> np.ndarray:
        with engine.start_weights():
            return engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=40).values

    plain = run_engine(1, on_rank, trainable=False)[0]
    np.testing.assert_array_equal(plain, run_engine(1, on_rank, keep_start_weights=True)[0])


@dataclass(frozen=True)
class Explodes:
    """The objective of the other tests, whose second micro-batch on the first rank is not a number."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, tokens: Any) -> Any:
        from megatron.core import parallel_state

        loss, metrics = self.inner(tokens)
        bad = parallel_state.get_data_parallel_rank() == 0 and 0 in tokens.row
        return (loss * torch.nan if bad else loss), metrics


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_weights_change(
    run_engine, samples: Batch, objective: Any
) -> None:
    def on_rank(engine: Any) -> tuple[str, Any, Any]:
        engine.update(mini_batches(samples), objective, tokens_per_micro_batch=40)
        before = weights(engine)
        try:
            engine.update(mini_batches(samples), Explodes(objective), tokens_per_micro_batch=40)
        except FloatingPointError as error:
            return str(error), before, weights(engine)
        raise AssertionError("it went through")

    ranks = run_engine(2, on_rank, optimizer=ADAM)
    for message, _, _ in ranks:
        assert (
            "policy version 1, mini-batch 1 of 2: the gradient is not finite: its norm is nan; lr 0.01, loss" in message
        )
    assert largest_difference(ranks[0][1], ranks[0][2]) == 0


def test_a_row_longer_than_the_micro_batch_is_an_error(run_engine, samples: Batch) -> None:
    def on_rank(engine: Any) -> str:
        with pytest.raises(ValueError, match="raise tokens_per_micro_batch") as caught:
            engine.logprobs(samples, temperature=1.0, tokens_per_micro_batch=5)
        return str(caught.value)

    assert "more than the 5 of a micro-batch" in run_engine(1, on_rank)[0]
