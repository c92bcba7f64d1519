"""``model.init``, held against the config class of its model type in the installed transformers.

Without transformers, and for model types that dagrl does not know by itself, nothing is checked here; the engine checks
once more when it is built.
"""

from __future__ import annotations

from dagrl.spec.checks.library_fields import check_fields
from dagrl.spec.errors import Place
from dagrl.spec.models.config_class import model_fields
from dagrl.spec.models.families import FAMILIES
from dagrl.spec.models.sizes import SIZE_KEYS, is_size
from dagrl.spec.reading.positions import Findings
from dagrl.spec.schema import ModelSpec, Pipeline


def check_model_fields(pipeline: Pipeline, findings: Findings) -> None:
    """Report fields that the config class does not have, and plain values of another type."""
    _check_init(("model", "init"), pipeline.model, findings)
    for name, engine in pipeline.engines.items():
        if engine.model is not None:
            _check_init(("engines", name, "model", "init"), engine.model, findings)


def _check_init(place: Place, model: ModelSpec, findings: Findings) -> None:
    init = model.init
    family = init.get("model_type") if init else None
    if init is None or family not in FAMILIES or (known := model_fields(family)) is None:
        return
    class_name, fields = known
    # `model.py` says what is wrong with a size.
    wrong_sizes = {name for name in SIZE_KEYS if not is_size(init.get(name))}
    given = {name: value for name, value in init.items() if name not in wrong_sizes | {"model_type"}}
    check_fields(place, given, fields, class_name, "transformers", findings)
