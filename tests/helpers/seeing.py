"""A tiny model that sees, and rows with images: what tests of images share. Import as ``from seeing import ...``."""

from typing import Any

import numpy as np

from dagrl.config.schema import ModelSpec
from dagrl.data.batch import Batch, Column
from dagrl.model_files.images import ImageSettings, image_settings

VISION = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
"""Two layers, one with windows of 2 x 2 squares, whose tokens are of 8 x 8 pixels."""
DEEP_VISION = {
    **{name: VISION[name] for name in ("depth", "hidden_size", "num_heads", "out_hidden_size", "patch_size")},
    "intermediate_size": 20,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
"""The same without windows; the first layer's output is added behind the language model's first layer, too."""
DEEP: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "head_dim": 8,
    "vision_config": DEEP_VISION,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}

GATED_DELTA = {
    **DEEP,
    "model_type": "qwen3_5",
    "head_dim": 16,
    "vision_config": {name: size for name, size in DEEP_VISION.items() if name != "deepstack_visual_indexes"},
    "rope_parameters": {**DEEP["rope_parameters"], "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""A layer with a gated delta net, and half of each head rotated."""


def seeing_model(**changes: Any) -> ModelSpec:
    """Qwen2.5-VL with random weights: two layers for text, two for images.

    With `DEEP` Qwen3-VL, with `GATED_DELTA` Qwen3.5.
    """
    fields = {
        "model_type": "qwen2_5_vl",
        "vocab_size": 61,
        "image_token_id": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "vision_config": VISION,
    }
    tokenizer = {"kind": "characters", "alphabet": "ab", "images": True}
    return ModelSpec.model_validate({"init": {**fields, **changes}, "tokenizer": tokenizer})


def settings_of(model: ModelSpec) -> ImageSettings:
    settings = image_settings(model)
    assert settings is not None
    return settings


def seeing_samples() -> Batch:
    """8 rows, two of each prompt, ids 100 to 107: with one image, two images, none, and one at the prompt's start."""
    random = np.random.default_rng(4)
    shapes = [[(16, 24)], [(8, 8), (24, 16)], [], [(32, 32)]]
    images = [[random.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in of_row] for of_row in shapes]
    prompts = []
    for row, of_row in enumerate(shapes):
        tokens = [] if row == 3 else random.integers(0, 60, 3).tolist()
        for height, width in of_row:
            tokens += [60] * (height * width // 64) + random.integers(0, 60, 2).tolist()
        prompts.append(tokens)
    none = np.zeros((0, 3), dtype=np.uint8)
    pixels = Column.ragged([np.concatenate([none, *(i.reshape(-1, 3) for i in of_row)]) for of_row in images], "uint8")
    sizes = Column.ragged([np.array(of_row, np.int32).reshape(-1, 2) for of_row in shapes], "int32")
    group = np.repeat(np.arange(4), 2)
    # A response may hold the token of images, which is text there.
    responses = [random.integers(0, 61, n) for n in random.integers(1, 9, 8)]
    responses[1][0] = 60
    return Batch(
        np.arange(100, 108),
        {
            "prompt_tokens": Column.ragged([prompts[each] for each in group], "int64"),
            "response_tokens": Column.ragged(responses, "int64"),
            "response_mask": Column.ragged([np.ones(len(each)) for each in responses], "float32"),
            "advantage": Column.ragged([random.normal(size=len(each)) for each in responses], "float32"),
            "reward": Column(random.normal(size=8).astype("float32")),
            "pixel_values": Column.shared(pixels, group),
            "image_sizes": Column.shared(sizes, group),
        },
    )
