"""Router replay: a mixture's routers send tokens to the experts that they went to when they were sampled.

R3, rollout routing replay (Ma et al. 2025, arXiv 2510.11370): the generator says which experts it chose, and the
trainer takes those in place of its own choice. How much each of them counts is the trainer's to say, with a gradient:
its softmax or sigmoid over the chosen ones. So a bit that falls the other way in one of the two engines no longer sends
a token to other weights.

Megatron asks the object in a router's ``router_replay`` to choose. Its own class for that replays what a global switch
says, forward or recomputed; the one here tells a recomputation by itself, whatever is recomputed and in whatever order
the pipeline runs.
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
    """The routers of a rank's chunks. Outside of `following` they choose by themselves."""

    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        """Take the place of the choice in all routers of `chunks`."""
        config = get_model_config(chunks[0])
        assert config.num_moe_experts is not None, "a model without experts has no routers"
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
        """What this rank needs of a batch's routes; None where the batch has none. ValueError for another model's."""
        if "routed_experts" not in batch:
            return None
        shape = batch["routed_experts"].values.shape[1:]
        if len(batch) and shape != (self._layers, self._chosen):
            raise ValueError(
                f"the generator tells of {' x '.join(map(str, shape))} layers and experts for each token, and the "
                f"model has {self._layers} x {self._chosen}; do both have the same model?"
            )
        return self._routes

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """ValueError where tokens go to experts that no router can choose. Waits for the device."""
        wrong = [_is_wrong(each.routes, self._experts) for each in micro_batches if each.routes is not None]
        if wrong and torch.stack(wrong).any():
            raise ValueError(
                "the generator tells of experts that no router can have chosen (one of them twice, or more than there "
                "are): its way to route does not tell; try another moe_runner_backend, or take router_replay out"
            )

    @contextmanager
    def following(self, *, training: bool) -> Iterator[None]:
        """Within the context, `begin` says which routes are taken; `training`: there is a backward pass to come."""
        guides = [guide for each in self._guides.values() for guide in each]
        for guide in guides:
            guide.keeps = training
        try:
            yield
            assert not any(guide.waiting for guide in guides), "a layer was not computed again"
        finally:
            for guide in guides:
                guide.reset()

    def begin(self, chunk: MegatronModule, micro_batch: MicroBatch) -> None:
        """The forward pass of `chunk` that comes now is of this micro-batch."""
        for guide in self._guides[chunk]:
            guide.routes = micro_batch.routes


class _Guide:
    """Chooses for one router: stands where megatron has its own ``RouterReplay``."""

    def __init__(self, place: int) -> None:
        """`place` of the router's layer among those of `Routes`."""
        self._place = place
        self.layer_number: int | None = None
        self.routes: torch.Tensor | None = None
        """Of the micro-batch whose forward pass it is."""
        self.keeps = False
        self.waiting: deque[torch.Tensor | None] = deque()
        """Of micro-batches whose forward pass will be computed again, oldest first."""
        self.reset()

    def reset(self) -> None:
        """Let the router choose by itself."""
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
        """Scores of the chosen experts, and which they are, [tokens, topk]; megatron's interface."""
        assert default_compute_topk is not None
        of_own_choice = default_compute_topk(scores, topk, num_groups, group_topk)
        routes = self._of_this_call()
        if routes is None:
            return of_own_choice
        told = routes[:, self._place].long()
        assert len(told) == len(scores), f"routes of {len(told)} tokens for {len(scores)}"
        # Nobody has told where padding went, nor a row's last token, which nothing was sampled after.
        chosen = torch.where(told >= 0, told, of_own_choice[1])
        return scores.gather(1, chosen), chosen

    def _of_this_call(self) -> torch.Tensor | None:
        """Routes of the micro-batch that goes through the router now.

        A layer that is recomputed runs without gradients first, and with them in the backward pass, whose micro-batches
        come in the order of the forward passes. One that is not runs with gradients at once.
        """
        if not self.keeps:
            return self.routes
        if torch.is_grad_enabled():
            return self.waiting.popleft() if self.waiting else self.routes
        self.waiting.append(self.routes)
        return self.routes


def _is_wrong(routes: torch.Tensor, experts: int) -> torch.Tensor:
    """Whether a token goes to an expert twice, or to one that there is not; bool, a scalar on the device."""
    ordered = routes.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    return twice.any() | (ordered >= experts).any() | ((ordered[..., 0] < 0) & (ordered[..., -1] >= 0)).any()
