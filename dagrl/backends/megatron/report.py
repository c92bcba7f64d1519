"""Reports problems of a Megatron engine by the keys of its section."""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.megatron.section import MegatronEngineSpec
from dagrl.config.errors import Place


def place_of(check: EngineCheck[MegatronEngineSpec], key: str) -> Place:
    """The place of a dotted key of the engine's section; that of the engine for an empty one."""
    return (*check.place, *key.split(".")) if key else check.place


def report(
    check: EngineCheck[MegatronEngineSpec], key: str, message: str, *depends: str | Place, code: str = ""
) -> None:
    """Report a problem at `key`; it may only follow from one at `depends`, keys of the section or other places."""
    places = [place_of(check, cause) if isinstance(cause, str) else cause for cause in depends]
    check.findings.error(place_of(check, key), message, code, depends_on=places)
