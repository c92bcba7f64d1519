"""Reports the outcome of an import, as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter

from dagrl.importing.settings import Remark, Unresolved
from dagrl.importing.table import Line, Status, Translation
from dagrl.redact import without_secrets

_TITLES = {
    Status.TRANSLATED: "Translated",
    Status.DEFAULT: "Defaults of {} that are written out",
    Status.IMPLIED: "Nothing to write: the pipeline does this without it",
    Status.REFUSED: "Refused: no counterpart",
    Status.UNKNOWN: "Unknown, or for you to decide",
}


def counts(translation: Translation) -> dict[str, int]:
    """Lines by status."""
    numbers = Counter(line.status for line in translation.lines)
    return {status.value: numbers[status] for status in Status}


def as_text(translation: Translation, remarks: tuple[Remark, ...]) -> str:
    """The lines by status, each with ``FILE:LINE key = value -> key of the pipeline: why``."""
    blocks = []
    for status, title in _TITLES.items():
        lines = [line for line in translation.lines if line.status is status]
        if lines:
            heading = title.format(translation.framework.version)
            blocks.append(f"{heading} ({len(lines)})\n" + "".join(f"  {_text(line)}\n" for line in _sorted(lines)))
    if remarks:
        notes = "".join(f"  {remark.file}:{remark.line}: {_cut(remark.message, 300)}\n" for remark in remarks)
        blocks.append(f"Parts of the script that were not read ({len(remarks)})\n{notes}")
    numbers = counts(translation)
    blocks.append(", ".join(f"{number} {status}" for status, number in numbers.items()) + "\n")
    return "\n".join(blocks)


def as_object(translation: Translation, remarks: tuple[Remark, ...]) -> dict[str, object]:
    """The report for programs."""
    return {
        "framework": translation.framework.name,
        "counts": counts(translation),
        "lines": [
            {
                "status": line.status.value,
                "place": line.place,
                "key": line.key,
                "value": _shown_value(line),
                "targets": list(line.targets),
                "note": line.note,
            }
            for line in _sorted(translation.lines)
        ],
        "remarks": [{"place": f"{remark.file}:{remark.line}", "message": remark.message} for remark in remarks],
    }


def _sorted(lines: list[Line]) -> list[Line]:
    def place(line: Line) -> tuple[str, int]:
        file, _, number = (line.place or "").rpartition(":")
        return file, int(number or 0)

    return sorted(lines, key=place)


def _shown_value(line: Line) -> object:
    """The value, unless its key names a secret."""
    value = line.value.text if isinstance(line.value, Unresolved) else line.value
    name = line.key.removeprefix("--").replace("-", "_").rpartition(".")[2]
    return without_secrets({name: value})[name]


def _text(line: Line) -> str:
    value = _shown_value(line)
    shown = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    place = f"{line.place}: " if line.place else ""
    arrow = f" -> {', '.join(line.targets)}" if line.targets else ""
    return f"{place}{_cut(line.key, 200)} = {_cut(shown, 80)}{arrow}" + (
        f": {_cut(line.note, 300)}" if line.note else ""
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
