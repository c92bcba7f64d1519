"""Router replay: a mixture's routers send tokens to the experts that were chosen in sampling.

R3, rollout routing replay (Ma et al. 2025, arXiv 2510.11370): the generator records which experts it chose, and the
trainer uses those. Their weights are the trainer's, with a gradient: its softmax or sigmoid over the chosen ones.

Megatron lets the object in a router's ``router_replay`` choose. Unlike Megatron's class, this one detects recomputation
itself, for any recomputed modules and any order of the pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_model_config

from dagrl.backends.megatron.engine.micro_batch import MicroBatch, Routes
from dagrl.data.batch import Batch

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RouterReplay:
    """The routers of a rank's chunks. Outside `following` the routers choose themselves."""

    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        config = get_model_config(chunks[0])
        assert config.num_moe_experts is not None, "the model has no experts"
        self._experts, self._chosen = config.num_moe_experts, config.moe_router_topk
        self._layers = config.num_layers
        self._guides: dict[MegatronModule, list[_Guide]] = {}
        own: list[int] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._guides[chunk] = [_Guide(len(own) + place) for place in range(len(routers))]
            # Megatron counts layers from 1, over all stages.
            own += [router.layer_number - 1 for router in routers]
            for router, guide in zip(routers, self._guides[chunk], strict=True):
                router.router_replay = guide
        split = config.sequence_parallel
        self._routes = Routes(
            layers=np.array(own, dtype=np.int64),
            sequence_rank=parallel_state.get_tensor_model_parallel_rank() if split else 0,
            sequence_ranks=parallel_state.get_tensor_model_parallel_world_size() if split else 1,
        )

    def routes_of(self, batch: Batch) -> Routes | None:
        """The rank's part of a batch's routes; None if it has none. Raises ValueError for routes of another model."""
        if "routed_experts" not in batch:
            return None
        shape = batch["routed_experts"].values.shape[1:]
        if len(batch) and shape != (self._layers, self._chosen):
            raise ValueError(
                f"the generator reports {' x '.join(map(str, shape))} layers and experts per token, but the "
                f"model has {self._layers} x {self._chosen}; do both have the same model?"
            )
        return self._routes

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Raise ValueError for experts that no router can choose. Waits for the device."""
        routes = [micro_batch.routes for micro_batch in micro_batches if micro_batch.routes is not None]
        wrong = [_is_wrong(recorded, self._experts) for recorded in routes]
        if wrong and torch.stack(wrong).any():
            raise ValueError(
                "the generator reports experts that no router can choose (one of them twice, or more than there "
                "are): its kernels do not record routes; try another moe_runner_backend, or remove router_replay"
            )

    @contextmanager
    def following(self, *, training: bool) -> Iterator[None]:
        """Context in which `begin` sets the routes; `training`: a backward pass follows."""
        guides = [guide for of_chunk in self._guides.values() for guide in of_chunk]
        for guide in guides:
            guide.keeps = training
        try:
            yield
            assert not any(guide.waiting for guide in guides), "a layer was not recomputed"
        finally:
            for guide in guides:
                guide.reset()

    def begin(self, chunk: MegatronModule, micro_batch: MicroBatch) -> None:
        for guide in self._guides[chunk]:
            guide.routes = micro_batch.routes


class _Guide:
    """Chooses for one router, in place of Megatron's ``RouterReplay``."""

    def __init__(self, place: int) -> None:
        """`place` of the router's layer among those of `Routes`."""
        self._place = place
        self.layer_number: int | None = None
        self.routes: torch.Tensor | None = None
        """Routes of the micro-batch in its forward pass."""
        self.keeps = False
        self.waiting: deque[torch.Tensor | None] = deque()
        """Routes of micro-batches whose forward pass will be recomputed, oldest first."""
        self.reset()

    def reset(self) -> None:
        self.routes, self.keeps = None, False
        self.waiting.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of the chosen experts, [tokens, topk]; Megatron's interface."""
        assert default_compute_topk is not None
        own_choice = default_compute_topk(scores, topk, num_groups, group_topk)
        routes = self._of_this_call()
        if routes is None:
            return own_choice
        recorded = routes[:, self._place].long()
        assert len(recorded) == len(scores), f"routes of {len(recorded)} tokens for {len(scores)}"
        # Padding and a row's last token have no recorded routes.
        chosen = torch.where(recorded >= 0, recorded, own_choice[1])
        return scores.gather(1, chosen), chosen

    def _of_this_call(self) -> torch.Tensor | None:
        """Routes of the router's current micro-batch.

        A recomputed layer runs without gradients first, and with them in the backward pass, in the same order.
        """
        if not self.keeps:
            return self.routes
        if torch.is_grad_enabled():
            return self.waiting.popleft() if self.waiting else self.routes
        self.waiting.append(self.routes)
        return self.routes


def _is_wrong(routes: torch.Tensor, experts: int) -> torch.Tensor:
    """Whether a token has an expert twice or an invalid one; bool, a scalar on the device."""
    ordered = routes.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return twice.any() | (ordered >= experts).any() | ((ordered[..., 0] < 0) & (ordered[..., -1] >= 0)).any()
