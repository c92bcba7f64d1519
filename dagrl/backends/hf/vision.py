"""Prompts with images as inputs of a Hugging Face model: embeddings, the tower's output among them, and positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dagrl.backends.base import GenerationRequest
from dagrl.backends.runtime.vision import SeenPrompt, patches, tower_output
from dagrl.model_files.images import ImageSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class SeenInputs:
    """Inputs of a vision model."""

    embedded: torch.Tensor
    positions: torch.Tensor
    """Positions, int64 [3, R, L]."""
    added: dict[str, torch.Tensor | list[torch.Tensor]]
    """Arguments of the language model: the image tokens, and the additions of its first layers."""


def seen_inputs(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], ids: torch.Tensor, settings: ImageSettings
) -> SeenInputs:
    """Inputs for `requests`, whose tokens `ids` [R, L] end alike.

    Image tokens in responses are text. ValueError if a prompt has other image tokens than its images take.
    """
    embedded = model.get_input_embeddings()(ids)
    positions = np.zeros((3, *ids.shape), dtype=np.int64)
    images: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for row, request in enumerate(requests):
        sizes = np.array([image.shape[:2] for image in request.images], dtype=np.int64).reshape(-1, 2)
        asked = len(sizes) - len(request.image_starts)
        prompt = SeenPrompt.of(request.prompt if asked else request.prompt[:0], sizes[:asked], settings)
        prompt = prompt.followed(len(request.prompt) + request.image_starts, sizes[asked:], settings)
        length = len(request.prompt) + len(request.begun)
        first = ids.shape[1] - length
        positions[:, row, first:] = prompt.positions(length)
        places.append(row * ids.shape[1] + first + prompt.places)
        images += request.images
    added: dict[str, torch.Tensor | list[torch.Tensor]] = {}
    if images:
        pixels, grids = patches(images, settings, embedded.device, embedded.dtype)
        where = torch.from_numpy(np.concatenate(places)).to(embedded.device)
        features = tower_output(model.model.visual, pixels, grids).to(embedded.dtype)
        embedded = embedded.flatten(0, 1).index_copy(0, where, features[0]).view_as(embedded)
        if len(features) > 1:
            seen = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device).index_fill(0, where, value=True)
            added = {"visual_pos_masks": seen.view_as(ids), "deepstack_visual_embeds": list(features[1:])}
    return SeenInputs(embedded, torch.from_numpy(positions).to(embedded.device), added)


@contextmanager
def adding(model: PreTrainedModel, added: Mapping[str, object]) -> Iterator[None]:
    """Context in which the language model within `model` is called with the arguments `added`, too."""
    if not added:
        yield
        return
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, **added}), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()
