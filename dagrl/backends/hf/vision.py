"""Prompts with images as inputs of a Hugging Face model: embeddings, the tower's output among them, and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dagrl.backends.base import GenerationRequest
from dagrl.backends.vision import SeenPrompt, patches, tower_output
from dagrl.models.images import ImageSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def seen_inputs(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], ids: torch.Tensor, settings: ImageSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [R, L, hidden] and positions [3, R, L] of `requests`, whose tokens `ids` [R, L] end alike.

    Only tokens of prompts and observations stand for images; a response may sample the same token, which is text there.
    Raises ValueError if a prompt has other image tokens than its images take.
    """
    inner: Any = model.model
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
    if images:
        pixels, grids = patches(images, settings, embedded.device, embedded.dtype)
        where = torch.from_numpy(np.concatenate(places)).to(embedded.device)
        features = tower_output(inner.visual, pixels, grids).to(embedded.dtype)
        embedded = embedded.flatten(0, 1).index_copy(0, where, features).view_as(embedded)
    return embedded, torch.from_numpy(positions).to(embedded.device)
