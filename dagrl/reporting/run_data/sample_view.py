"""Samples of a step or a validation, from `samples/` of the run folder."""

from __future__ import annotations

import math
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from dagrl.config.columns import LOGPROB_COLUMNS
from dagrl.tracking.run_file import run_file

_FILE = re.compile(r"step_(\d+)(_val)?\.parquet")
_NOT_SHOWN = frozenset({"response_tokens", "token_version"})
"""Token ids, which the text replaces, and versions, which ``versions`` sums up."""
_USER = re.compile(
    r"<\|im_start\|>user\n|<\|start_header_id\|>user<\|end_header_id\|>\n\n|<start_of_turn>user\n|\[INST\]"
    r"|<\|start\|>user<\|message\|>|<\|user\|>\n?|<｜User｜>"
)
"""Beginnings of a user's message in the chat templates of common models."""
_MESSAGE_END = re.compile(
    r"<\|(?:im_end|eot_id|end|assistant)\|>|<end_of_turn>|\[/INST\]|<｜(?:Assistant|end▁of▁sentence)｜>"
)
_LONGEST_ASKED = 200


def sample_steps(folder: Path) -> dict[str, list[int]]:
    """``train`` and ``val`` -> steps with samples, in order."""
    by_kind: dict[str, list[int]] = {"train": [], "val": []}
    samples = folder / "samples"
    for path in samples.iterdir() if samples.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            by_kind["val" if match[2] else "train"].append(int(match[1]))
    return {kind: sorted(steps) for kind, steps in by_kind.items()}


def sample_view(folder: Path, step: int, *, validation: bool) -> list[dict[str, object]]:
    """The samples, one dictionary each. ValueError or OSError if there is no such file, or it cannot be read.

    ``token_count`` is the length of the response, ``versions`` are the weight versions that sampled its tokens.
    Log-probs have four digits. ``asked`` is the part of the prompt that differs from other prompts: see `_asked`.
    """
    import pyarrow.parquet as pq

    path = sample_file(folder, step, validation=validation)
    if path is None:
        raise FileNotFoundError(f"{folder} holds no samples of step {step}")
    try:
        with pq.ParquetFile(path) as file:
            rows = file.read().to_pylist()
        asked = _asked([str(row.get("prompt") or "") for row in rows])
        return [_shown(row) | {"asked": text} for row, text in zip(rows, asked, strict=True)]
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}; remove it") from error


def sample_file(folder: Path, step: int, *, validation: bool = False) -> Path | None:
    """The file of a step's samples; None if there is none. ValueError as in `run_file`."""
    return run_file(folder, "samples", f"step_{step}{'_val' if validation else ''}.parquet")


def _asked(prompts: list[str]) -> list[str]:
    """The user's last message of each prompt, without a common prefix of all; long ones are cut."""
    messages = (_USER.split(prompt)[-1] for prompt in prompts)
    texts = [
        _MESSAGE_END.split(message)[0].strip() or prompt for message, prompt in zip(messages, prompts, strict=True)
    ]
    # The common prefix of the first and the last text in alphabetical order is common to all.
    first, last = (min(texts), max(texts)) if texts else ("", "")
    same = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    begin = 0 if first == last else len(same) - len(re.split(r"[\s>\]]", same)[-1])
    return [("…" if begin else "") + text[begin : begin + _LONGEST_ASKED] for text in texts]


def _shown(row: dict[str, Any]) -> dict[str, object]:
    shown = {name: _plain(value) for name, value in row.items() if name not in _NOT_SHOWN and value is not None}
    if "response_tokens" in row:
        shown["token_count"] = len(row["response_tokens"])
    if "token_version" in row:
        shown["versions"] = sorted({version for version in row["token_version"] if version >= 0})
    for name in LOGPROB_COLUMNS:
        if name in row:
            shown[name] = [float(f"{value:.4g}") if math.isfinite(value) else None for value in row[name]]
    return shown


def _plain(value: Any) -> Any:
    """The value in JSON types: without NaN and infinity, other types as text."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case dict():
            return {str(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
    return str(value)
