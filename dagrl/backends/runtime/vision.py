"""Images as inputs of a vision-language model: patches of normalised pixels, and their places among a row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dagrl.backends.families.vision import mrope_positions
from dagrl.model_files.images import ImageSettings, image_starts


@dataclass(frozen=True, slots=True)
class SeenPrompt:
    """The places of the images of a prompt and of its continuation, without pixels."""

    starts: np.ndarray
    """Index of the first token of each image, int64 [images]."""
    grids: np.ndarray
    """Rows and columns of tokens of each image, int64 [images, 2]."""

    @staticmethod
    def of(tokens: np.ndarray, sizes: np.ndarray, settings: ImageSettings) -> SeenPrompt:
        """The places in a prompt's `tokens` of images of these `sizes` [images, 2]. ValueError if they do not match."""
        starts = image_starts(tokens, sizes, settings)
        return SeenPrompt(starts, np.asarray(sizes, dtype=np.int64).reshape(-1, 2) // settings.unit)

    def followed(self, starts: np.ndarray, sizes: np.ndarray, settings: ImageSettings) -> SeenPrompt:
        """Add the images of a response, of these `sizes`, at `starts` in the whole row."""
        grids = np.asarray(sizes, dtype=np.int64).reshape(-1, 2) // settings.unit
        return SeenPrompt(np.concatenate([self.starts, starts]), np.concatenate([self.grids, grids]))

    @property
    def places(self) -> np.ndarray:
        """Indices of all image tokens, in order, int64 [image tokens]."""
        counts = self.grids.prod(axis=1)
        ranges = [start + np.arange(count) for start, count in zip(self.starts, counts, strict=True)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *ranges])

    def positions(self, length: int) -> np.ndarray:
        """Positions of the prompt's tokens and those after it, int64 [3, length]."""
        return mrope_positions(length, self.starts, self.grids)


def patches(
    images: Sequence[np.ndarray], settings: ImageSettings, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [patches, values] of images uint8 [height, width, 3], and the grid of each, int64 [images, 3].

    As in Qwen2-VL's image processor: the patches of a square are consecutive, and the values of a patch are ordered by
    colour, frame, row and column.
    """
    mean = torch.tensor(settings.mean, device=device) * 255
    deviation = torch.tensor(settings.std, device=device) * 255
    parts, grids = [], []
    for image in images:
        rows, columns = (side // settings.patch for side in image.shape[:2])
        pixels = (torch.tensor(np.ascontiguousarray(image), device=device).float() - mean) / deviation
        merge, patch = settings.merge, settings.patch
        squares = pixels.view(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        # To squares, patches of a square, colours and pixels of a patch.
        ordered = squares.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, patch * patch)
        parts.append(ordered.expand(-1, -1, settings.frames, -1).reshape(rows * columns, -1).to(dtype))
        grids.append([1, rows, columns])
    return torch.cat(parts), torch.tensor(grids, device=device)


def tower_output(tower: Any, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Run a tower, a module of Hugging Face, on all images. Returns [1 + D, image tokens, hidden].

    The first are their embeddings. The others are added to the outputs of the first D layers of the language model.
    """
    output = tower(pixels, grid_thw=grids, return_dict=True)
    return torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())])
