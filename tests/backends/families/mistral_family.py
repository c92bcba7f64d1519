"""A family outside dagrl, in one file: Mistral without its sliding window. `test_new_family` installs it."""

from __future__ import annotations

from dagrl.backends.families.base import Family


class Mistral(Family):
    """Dense models of Mistral."""

    model_type = "mistral"
    required = {"sliding_window": (None,)}


FAMILY = Mistral()
