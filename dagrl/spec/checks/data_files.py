"""The prompt files: there, whole, and in verl's schema. Reads their footers only; `dagrl.data` reads the rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.spec.errors import Place, suggest
from dagrl.spec.positions import Findings
from dagrl.spec.schema import Pipeline

if TYPE_CHECKING:
    import pyarrow as pa


def check_data_files(pipeline: Pipeline, findings: Findings) -> dict[str, int]:
    """Report what is wrong with the prompt files; the rows of those that are right, by their key under ``data``."""
    rows = {}
    for key, path in pipeline.data.files.items():
        place: Place = ("data", *key.split("."))
        if not findings.trusted(place):
            continue
        count = _check_file(path, place, findings)
        if count is not None:
            rows[key] = count
    prompts = pipeline.data.prompts_per_step
    if "train" in rows and rows["train"] < prompts:
        message = (
            f"the file's {rows['train']} prompts do not fill one step of {prompts}, so prompts come more than once"
        )
        findings.warning(("data", "train"), f"{message}; add prompts or lower data.prompts_per_step")
    return rows


def _check_file(path: Path, place: Place, findings: Findings) -> int | None:
    """Rows of the file, if it is a prompt file."""
    try:
        return _check_kind(path, place, findings)
    except OSError as error:
        findings.error(place, f"{path} cannot be read ({error.strerror}); check the path and its permissions")
        return None


def _check_kind(path: Path, place: Place, findings: Findings) -> int | None:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        remedy = f"name a file in it, such as {files[0].name}" if files else "give a parquet file"
        findings.error(place, f"{path} is a folder; {remedy}")
    elif not path.exists():
        command = f"{_script_for(path)} --local_dir {path.parent}"
        findings.error(place, f"{path} does not exist; check the path, or make the file with `python {command}`")
    elif path.stat().st_size == 0:
        findings.error(place, f"{path} is empty (0 bytes); make the file again")
    elif (other := _other_format(path)) is not None:
        command = f"{_script_for(path)} --local_dir DIR --source {path.parent}"
        findings.error(place, f"{path} is {other}, not parquet; make parquet of it with `python {command}`")
    else:
        return _check_parquet(path, place, findings)
    return None


def _script_for(path: Path) -> str:
    return f"data_preprocess/{'gsm8k' if 'gsm8k' in str(path).lower() else 'NAME'}.py"


def _other_format(path: Path) -> str | None:
    """What the file is, if it is readable text instead of parquet."""
    with path.open("rb") as file:
        head = file.read(256)
    if head.startswith(b"PAR1"):
        return None
    if head.lstrip()[:1] in (b"{", b"["):
        return "JSON"
    return "CSV" if path.suffix == ".csv" else None


def _check_parquet(path: Path, place: Place, findings: Findings) -> int | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        reason = str(error).split(". ")[0].split("\n")[0].rstrip(".")
        findings.error(place, f"{path} cannot be read as parquet ({reason}); make the file again")
        return None
    problems = _schema_problems(schema)
    if rows == 0:
        problems.append("has no rows; make the file again")
    for problem in problems:
        findings.error(place, f"{path} {problem}")
    return None if problems else rows


def _schema_problems(schema: pa.Schema) -> list[str]:
    import pyarrow.types as kinds

    problems = []
    for name in ("prompt", "data_source", "reward_model"):
        if name not in schema.names:
            problems.append(f"has no column `{name}`; {suggest(name, schema.names)}")
    if "prompt" in schema.names and not (
        _is_text(schema.field("prompt").type) or _is_chat(schema.field("prompt").type)
    ):
        kind = schema.field("prompt").type
        problems.append(f"has prompts of type {kind}; they must be text, or lists of messages with role and content")
    if "data_source" in schema.names and not _is_text(schema.field("data_source").type):
        problems.append(f"has a data_source of type {schema.field('data_source').type}; it must be text")
    if "reward_model" in schema.names:
        kind = schema.field("reward_model").type
        if not kinds.is_struct(kind):
            problems.append(f"has a reward_model of type {kind}; it must be a struct with the field ground_truth")
        elif kind.get_field_index("ground_truth") < 0:
            fields = [kind.field(index).name for index in range(kind.num_fields)]
            problems.append(f"has no field `ground_truth` in reward_model; {suggest('ground_truth', fields)}")
    return problems


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow.types as kinds

    if kinds.is_dictionary(kind):
        return _is_text(kind.value_type)
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _is_chat(kind: pa.DataType) -> bool:
    import pyarrow.types as kinds

    if not (kinds.is_list(kind) or kinds.is_large_list(kind)) or not kinds.is_struct(kind.value_type):
        return False
    message = kind.value_type
    return all(
        message.get_field_index(key) >= 0 and _is_text(message.field(message.get_field_index(key)).type)
        for key in ("role", "content")
    )
