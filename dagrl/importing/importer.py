"""Imports a file: reads it, translates it, and writes the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.importing.pipeline_text import pipeline_text
from dagrl.importing.registry import FRAMEWORKS
from dagrl.importing.settings import ImportProblem, Remark
from dagrl.importing.sources import read_source
from dagrl.importing.table import Translation, translate


@dataclass(frozen=True, slots=True)
class Imported:
    """A pipeline from another framework's file."""

    translation: Translation
    text: str
    """The pipeline file."""
    remarks: tuple[Remark, ...]
    """Parts of the script that were not read."""


def import_file(
    path: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    framework: str | None = None,
) -> Imported:
    """Translate a script or configuration, with the arguments of `read_source`. ImportProblem if that fails."""
    try:
        source = read_source(path, arguments, variables, framework)
        translation = translate(FRAMEWORKS[source.framework], source.settings)
        return Imported(translation, pipeline_text(translation, path), source.remarks)
    except ImportProblem:
        raise
    except RecursionError as error:
        raise ImportProblem(f"{path}: is nested too deeply, or names itself") from error
    except Exception as error:
        # A bug in a rule: a script may hold any text. The user gets one sentence, the traceback keeps the cause.
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ImportProblem(f"{path}: cannot be translated, by a fault of dagrl ({why}); please report it") from error
