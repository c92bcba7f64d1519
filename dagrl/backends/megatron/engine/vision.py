"""A language model of Megatron-core with the vision tower of Hugging Face.

The tower is whole on each rank of the first pipeline stage; tensor-parallel ranks compute it redundantly, which needs
no communication: each of them gets the whole gradient of the embeddings.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

from dagrl.backends.megatron.engine.transfer import to_device
from dagrl.backends.runtime.vision import SeenPrompt, patches, tower_output
from dagrl.data.batch import Batch
from dagrl.data.image_column import images_at
from dagrl.model_files.images import ImageSettings
from dagrl.model_files.library_model import auto_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class PackedImages:
    """The distinct images of a micro-batch."""

    images: tuple[np.ndarray, ...]
    """Uint8 [height, width, 3] each."""
    places: torch.Tensor
    """Indices of the image tokens among the rank's tokens, int64 [F]."""
    features: torch.Tensor
    """Index of the tower's output for each of them, int64 [F]."""
    settings: ImageSettings


class VisionGPTModel(GPTModel):
    """A `GPTModel` whose first stage has a vision tower, ``visual``."""

    def __init__(
        self, *args: object, hf_config: PretrainedConfig, interleaved_sections: bool = False, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        rotate_by_token()
        rotary: MultimodalRotaryEmbedding = self.get_submodule("rotary_pos_emb")
        # Positions already belong to the rank's tokens.
        rotary.cp_group = None
        if interleaved_sections:
            self.rotary_pos_emb = InterleavedRotary(rotary.inv_freq)
        self.visual: PreTrainedModel | None = None
        self._added: list[torch.Tensor] = []
        if self.pre_process:
            self.visual = build_tower(hf_config, self.config.params_dtype)
            extra = getattr(hf_config.vision_config, "deepstack_visual_indexes", ())
            for number, layer in enumerate(self.decoder.layers[: len(extra)]):
                layer.register_forward_hook(partial(self._add, number))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *args: object,
        images: PackedImages | None,
        **kwargs: object,
    ) -> torch.Tensor:
        """See `GPTModel.forward`; `images` replace the embeddings of their tokens."""
        decoder_input = self._embedded(input_ids, images) if self.pre_process else None
        output: torch.Tensor = super().forward(input_ids, position_ids, *args, decoder_input=decoder_input, **kwargs)
        self._added = []
        return output

    def _add(
        self, number: int, layer: torch.nn.Module, inputs: object, outputs: tuple[torch.Tensor, torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, context = outputs
        return (hidden + self._added[number], context) if self._added else outputs

    def _embedded(self, input_ids: torch.Tensor, images: PackedImages | None) -> torch.Tensor:
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        if images is not None:
            features = self._features(images)[:, images.features, None].to(embedded.dtype)
            for extra in features[1:]:
                added = torch.zeros_like(embedded).index_copy(0, images.places, extra)
                self._added.append(
                    scatter_to_sequence_parallel_region(added) if self.config.sequence_parallel else added
                )
            embedded = embedded.index_copy(0, images.places, features[0])
        elif self.training and any(parameter.requires_grad for parameter in self._tower().parameters()):
            # Gradients of all parameters are awaited, also of a tower without images.
            embedded = embedded + 0 * self._features(_blank(self._tower())).sum().to(embedded.dtype)
        if self.config.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
        return embedded

    def _features(self, images: PackedImages) -> torch.Tensor:
        parameter = next(self._tower().parameters())
        pixels, grids = patches(images.images, images.settings, parameter.device, parameter.dtype)
        return tower_output(self._tower(), pixels, grids)

    def _tower(self) -> PreTrainedModel:
        assert self.visual is not None, "only the first stage has a tower"
        return self.visual


class InterleavedRotary(torch.nn.Module):
    """Angles of three-dimensional positions whose frequencies alternate between time, height and width.

    This is Qwen3-VL's M-RoPE (https://arxiv.org/abs/2511.21631).
    """

    def __init__(self, inv_freq: torch.Tensor) -> None:
        super().__init__()
        self._inv_freq = inv_freq

    def forward(
        self, position_ids: torch.Tensor, mrope_section: Sequence[int], cp_group: object = None
    ) -> torch.Tensor:
        """Angles [tokens, batch, 1, 2 * frequencies] of positions [3, batch, tokens]."""
        axis = torch.zeros(len(self._inv_freq), dtype=torch.int64)
        for dimension in (1, 2):
            axis[dimension : 3 * mrope_section[dimension] : 3] = dimension
        places = position_ids[axis.to(position_ids.device)].to(self._inv_freq)
        angles = (places * self._inv_freq[:, None, None]).permute(2, 1, 0)
        return torch.cat([angles, angles], dim=-1)[:, :, None]


def rotate_by_token() -> None:
    """Let this process's rotary embeddings of packs take one angle per token.

    Megatron's own function would synchronise the GPU for each sequence.
    """
    from megatron.core.models.common.embeddings import rope_utils

    def rotate(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *args: object,
        cp_group: object,
        **kwargs: object,
    ) -> torch.Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, *args, **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate


def build_tower(hf_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The tower of a model on the rank's device, its weights unset. It recomputes its layers in the backward pass."""
    from transformers import PreTrainedModel

    module = sys.modules[auto_class(hf_config)._model_mapping[type(hf_config)].__module__]
    wanted = type(hf_config.vision_config)
    classes: list[type[PreTrainedModel]] = [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    ]
    (kind,) = (kind for kind in classes if kind.config_class is wanted)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    # Its own initialisation is replaced, and must not advance the process's random stream.
    with torch.random.fork_rng(), device:
        tower: PreTrainedModel = kind._from_config(hf_config.vision_config, dtype=torch.float32)
    for parameter in tower.parameters():
        # Buffers, such as frequencies, stay in float32.
        parameter.data = parameter.data.to(dtype)
    tower.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


def _blank(tower: PreTrainedModel) -> PackedImages:
    """One square of black pixels."""
    config = tower.config
    side = config.patch_size * config.spatial_merge_size
    settings = ImageSettings(
        0, config.patch_size, config.spatial_merge_size, config.temporal_patch_size, (0.0,) * 3, (1.0,) * 3
    )
    none = torch.zeros(0, dtype=torch.int64)
    return PackedImages((np.zeros((side, side, 3), dtype=np.uint8),), none, none, settings)


def seen(batch: Batch, row: int, settings: ImageSettings) -> SeenPrompt:
    """The places of the images of a batch's row. ValueError, which names the row, if its tokens do not match them."""
    sizes = batch["image_sizes"][row] if "image_sizes" in batch else np.zeros((0, 2), dtype=np.int64)
    tokens = batch["prompt_tokens"][row] if len(sizes) else np.zeros(0, dtype=np.int64)
    try:
        prompt = SeenPrompt.of(tokens, sizes, settings)
    except ValueError as error:
        raise ValueError(f"row {batch.rows[row]}: {error}") from error
    if "response_image_starts" not in batch:
        return prompt
    starts = len(batch["prompt_tokens"][row]) + batch["response_image_starts"][row].astype(np.int64)
    return prompt.followed(starts, batch["response_image_sizes"][row], settings)


def packed_images(
    batch: Batch, rows: np.ndarray, starts: np.ndarray, held: np.ndarray, settings: ImageSettings, device: torch.device
) -> PackedImages | None:
    """Images of `rows`, which begin at `starts` in the pack; None without images. The rank has the tokens `held`."""
    images: list[np.ndarray] = []
    first_feature: dict[int, int] = {}
    places, features, following = [], [], 0
    for start, row in zip(starts, rows, strict=True):
        of_row = [*images_at(batch, row), *images_at(batch, row, "response_")]
        if of_row:
            places.append(start + seen(batch, row, settings).places)
        for image in of_row:
            count = int(settings.tokens(np.array(image.shape[:2]))[0])
            # Rows that share an image share its memory.
            if (address := image.ctypes.data) not in first_feature:
                first_feature[address] = following
                images.append(image)
                following += count
            features.append(first_feature[address] + np.arange(count))
    if not images:
        return None
    wanted = np.concatenate(places)
    feature = np.full(max(held.max(), wanted.max()) + 1, -1, dtype=np.int64)
    feature[wanted] = np.concatenate(features)
    own = np.flatnonzero(feature[held] >= 0)
    return PackedImages(tuple(images), to_device(own, device), to_device(feature[held[own]], device), settings)
