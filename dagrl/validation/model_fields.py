"""The fields of a model's config, one by one and together, in ``model.init`` and in config.json alike.

The config class of the installed transformers says which fields there are. Without transformers, and for model types
that dagrl does not know by itself, names are not checked; the engine checks once more when it is built.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.models.config_class import model_defaults, model_fields
from dagrl.models.config_fields import wrong_values
from dagrl.models.config_rules import wrong_combinations
from dagrl.models.families import FAMILIES
from dagrl.models.library_fields import check_names
from dagrl.models.shape import sizes_left_out
from dagrl.validation.model_family import said_at


def check_config(section: Place, config: Mapping[str, Any], file: Path | None, findings: Findings) -> bool:
    """Report fields that the config class does not have, values that they cannot have, and sizes that do not fit.

    `section` is where the pipeline says the config, ``model.init`` or ``model.path``; `file` is the folder's
    config.json, which may have fields of its own. Returns whether all values can be worked with.
    """
    family = config.get("model_type")
    class_name, types = (model_fields(family) if family in FAMILIES else None) or ("", {})
    if file is None and types:
        given = [name for name in config if name != "model_type"]
        check_names(section, given, types, class_name, "transformers", findings)
    wrong = {field: message for field, message in wrong_values(config, types) if file or not types or field in types}
    for field, message in wrong.items():
        where = f"{file} has a wrong value of `{field}`: " if file else ""
        remedy = "copy the file again, or correct it" if file else "write it so, or take it out"
        findings.error(said_at(section, field), f"{where}{message}; {remedy}")
    if wrong:
        return False
    if file and (left_out := sizes_left_out(config)):
        message = f"{file} does not say {left_out[0]}, a size of the model; copy the file again, or add it there"
        findings.error(section, message)
        return False
    defaults = model_defaults(family) if family in FAMILIES else {}
    for message in wrong_combinations(ChainMap(dict(config), defaults)):
        findings.error(section, f"{file}: {message}" if file else message)
    return True
