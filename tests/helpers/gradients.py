"""Gradients by Hugging Face names, whole and on one rank, at any layout: what layouts are compared by.

Import as ``from gradients import hf_gradients``: pytest's `pythonpath` holds this folder.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.weight_sync.exporter import exported

if TYPE_CHECKING:
    from dagrl.data.batch import Batch
    from dagrl.data.stats import Stat


def gradients_of(engine: Any, batch: "Batch", objective: Any, *, tokens_per_micro_batch: int) -> dict[str, Any]:
    """The gradient of `objective` over all ranks' batches at the engine's weights, which stay; see `hf_gradients`."""
    return gradients_and_sums(engine, batch, objective, tokens_per_micro_batch=tokens_per_micro_batch)[0]


def gradients_and_sums(
    engine: Any, batch: "Batch", objective: Any, *, tokens_per_micro_batch: int
) -> tuple[dict[str, Any], dict[str, "Stat"]]:
    """`gradients_of`, and this data-parallel rank's metrics."""
    from dagrl.backends.megatron.engine.optimizer import clear_gradients

    training = engine._own_training()
    clear_gradients(training.chunks, training.optimizer)
    sums = engine._model.accumulate_gradient(batch, objective, tokens_per_micro_batch=tokens_per_micro_batch)
    return hf_gradients(engine), sums


def step_of_ranks(
    run_engine: Any,
    ranks: int,
    sizes: dict[str, Any],
    *,
    objective_of: Callable[[], Any],
    shares_of: Callable[[int], "Sequence[Batch]"],
    tokens_per_micro_batch: int,
) -> tuple[dict[str, Any], dict[str, tuple[float, float, float]]]:
    """Rank 0's gradients, and the metrics, with their extremes, which are checked to be the same on all `ranks`.

    `shares_of` says of so many replicas which rows each has; `objective_of` makes the objective, on each rank.
    """
    parallel = ParallelSpec.model_validate(sizes)
    places, shares = coordinates(parallel, ranks), shares_of(parallel.data_parallel_size(ranks))

    def on_rank(engine: Any) -> Any:
        from dagrl.backends.megatron.engine.loss import join_replicas

        mine = shares[places[torch.distributed.get_rank()].dp]
        budget = tokens_per_micro_batch
        gradients, metrics = gradients_and_sums(engine, mine, objective_of(), tokens_per_micro_batch=budget)
        return gradients, {name: (stat.mean, stat.low, stat.high) for name, stat in join_replicas(metrics).items()}

    optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
    answers = run_engine(ranks, on_rank, parallel=sizes, optimizer=optimizer)
    assert all(told == answers[0][1] for _, told in answers), "metrics are the same on every rank"
    return answers[0]


def assert_same(gradients: dict[str, Any], expected: dict[str, Any], bound: float = 1e-5) -> None:
    """To `bound` of each tensor's largest entry."""
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        assert error < bound, f"{name}: {error:.1e}"


@torch.no_grad()
def hf_gradients(engine: Any, exporter: Callable[[], Any] | None = None) -> dict[str, torch.Tensor]:
    """The reduced gradients of an engine's parameters, as they are exported: name -> float32 on the CPU.

    `exporter` makes one for the trained parameters, by default the engine's own, where it trains all.

    Collective; rank 0 gets all, the others nothing. To be called after `PackedModel.accumulate_gradient`, with either
    optimizer. The engine stays as it is, save that its gradient buffers are then whole on every rank.
    """
    for chunk in engine._model.chunks:
        _gather_shards(chunk)
    with _gradients_in_place_of_weights(engine._model.chunks):
        if exporter is None:
            buckets = engine.export_weights(1 << 28)
        else:
            buckets = exported(exporter(), is_root=torch.distributed.get_rank() == 0)
        return {name: tensor.float().cpu() for bucket in buckets for name, tensor in bucket}


def _gather_shards(chunk: Any) -> None:
    """With the distributed optimizer, a replica holds the sum for its own shard of each bucket only."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group = bucket_group.intra_distributed_optimizer_instance_group
        for bucket in bucket_group.buckets:
            shards = bucket.grad_data.chunk(group.size())
            torch.distributed.all_gather_into_tensor(bucket.grad_data, shards[group.rank()].clone(), group=group)


@contextmanager
def _gradients_in_place_of_weights(chunks: list[Any]) -> Iterator[None]:
    """Within the context the modules' parameters are others, that hold the gradients; buffers, which have none, are 0.

    The parameters themselves are not touched: the gradient hooks of megatron hang on them.
    """
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    own: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for chunk in chunks:
        for module in chunk.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    if parameter not in stand_ins:
                        stand_ins[parameter] = torch.nn.Parameter(parameter.main_grad, requires_grad=False)
                        stand_ins[parameter].__dict__.update(parameter.__dict__)
                    own.append((module._parameters, name, parameter))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    own.append((module._buffers, name, buffer))
                    stand_ins.setdefault(buffer, torch.zeros_like(buffer))
    try:
        for place, name, tensor in own:
            place[name] = stand_ins[tensor]
        yield
    finally:
        for place, name, tensor in own:
            place[name] = tensor
