"""A family outside dagrl, in one file: SmolLM3. `test_new_family` installs it."""

from __future__ import annotations

from dagrl.backends.families.base import Family


class SmolLm3(Family):
    """SmolLM3 whose layers all have rotary embeddings."""

    model_type = "smollm3"
    required = {"use_sliding_window": (False,)}


FAMILY = SmolLm3()
