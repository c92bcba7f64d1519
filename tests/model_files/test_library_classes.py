"""Fields read from the source of libraries are those of the imported libraries."""

from __future__ import annotations

import pytest

from dagrl.model_files.library_classes import auto_classes


@pytest.mark.parametrize(
    "mapping", ["MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_SEQUENCE_CLASSIFICATION"]
)
def test_classes_by_model_type_are_those_of_the_library(mapping: str) -> None:
    from transformers.models.auto import modeling_auto

    found = auto_classes(mapping)
    assert found and found == dict(getattr(modeling_auto, f"{mapping}_MAPPING_NAMES"))
