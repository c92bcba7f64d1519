"""Imports a file: reads it, translates it, and writes the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagrl.importing.bounded import bounded
from dagrl.importing.pipeline_text import pipeline_text
from dagrl.importing.registry import FRAMEWORKS
from dagrl.importing.settings import Remark
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
    folder: Path | None = None,
) -> Imported:
    """Translate a script or configuration. `read_source` describes the arguments; ImportProblem if it cannot be read.

    A child process does it, with bounded time and memory. `folder` is that of the pipeline file, where data files are
    looked for. Default: the source's.
    """

    def work() -> tuple[Any, ...]:
        source = read_source(path, arguments, variables, framework)
        t = translate(FRAMEWORKS[source.framework], source.settings, folder or path.resolve().parent)
        return source.framework, t.settings, t.tree, t.origins, t.lines, pipeline_text(t, path), source.remarks

    name, settings, tree, origins, lines, text, remarks = bounded(work, path)
    return Imported(Translation(FRAMEWORKS[name], settings, folder, tree, origins, lines), text, remarks)
