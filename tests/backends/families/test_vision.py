"""Positions in three dimensions, and the tensors of a tower."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeing import DEEP, GATED_DELTA, seeing_model

from dagrl.backends.families.registry import model_shape
from dagrl.backends.families.vision import mrope_positions
from dagrl.backends.runtime.initial_weights import published_shapes
from dagrl.model_files.library_model import library_shapes, load_hf_config


def test_text_is_counted_and_images_take_rows_and_columns() -> None:
    positions = mrope_positions(10, np.array([2]), np.array([[2, 3]]))
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert mrope_positions(3, np.zeros(0, int), np.zeros((0, 2), int)).tolist() == [[0, 1, 2]] * 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(0, 5))
def test_positions_are_those_of_hugging_face(images: list[tuple[int, int, int]], rest: int) -> None:
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    # Hugging Face takes neighbouring images for one.
    kinds = [kind for text, rows, columns in images for kind in [0] * (text + 1) + [1] * (rows * columns)]
    kinds += [0] * (rest + 1)
    ends = np.cumsum([text + 1 + rows * columns for text, rows, columns in images], dtype=int)
    grids = np.array([(rows, columns) for _, rows, columns in images], dtype=int).reshape(-1, 2)
    ours = mrope_positions(len(kinds), ends - grids.prod(axis=1), grids)
    thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]) if images else None
    theirs, _ = model.get_rope_index(torch.zeros(1, len(kinds)).long(), torch.tensor([kinds]).int(), thw)
    assert theirs[:, 0].tolist() == ours.tolist()


@pytest.mark.parametrize("changes", [{}, DEEP, GATED_DELTA], ids=["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_names_and_shapes_are_those_of_the_library(changes: dict[str, Any]) -> None:
    config = load_hf_config(seeing_model(**changes))
    assert published_shapes(config) == library_shapes(config)


def test_the_tower_counts() -> None:
    shape = model_shape(seeing_model())
    assert shape.vision is not None
    text = shape.embedding + shape.output + shape.final_norm
    text += sum(shape.layer(index).total for index in shape.positions)
    assert shape.parameters == text + shape.vision.parameters
