"""The frameworks that pipelines can be imported from, by the names of ``--from``."""

from __future__ import annotations

from dagrl.importing.roll import ROLL
from dagrl.importing.slime import SLIME
from dagrl.importing.table import Framework
from dagrl.importing.trinity import TRINITY
from dagrl.importing.verl import SIIRL, VERL

FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in (SIIRL, VERL, SLIME, ROLL, TRINITY)}
"""siiRL's files also have verl's sections, so it comes before verl."""
