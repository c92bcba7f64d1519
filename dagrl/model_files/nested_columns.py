"""Columns of a prompt file, and fields of its structs, such as ``extra_info.answer``: their types and values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def column_type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column, or of a struct's field; None if it does not exist, or if its name is ambiguous."""
    import pyarrow.types as kinds

    name, *fields = column.split(".")
    found = schema.field(name).type if schema.names.count(name) == 1 else None
    for field in fields:
        if found is None or not kinds.is_struct(found) or found.get_field_index(field) < 0:
            return None
        found = found.field(field).type
    return found


def repeated(schema: pa.Schema, columns: Iterable[str]) -> str | None:
    """The first of these columns with duplicates in a file, as the predicate of a sentence about the file."""
    for name in dict.fromkeys(column.partition(".")[0] for column in columns):
        if (times := schema.names.count(name)) > 1:
            return f"has {times} columns `{name}`; keep one of them"
    return None


def is_list(kind: pa.DataType | None) -> bool:
    """Whether a type is a list type; polars writes large lists."""
    import pyarrow.types as kinds

    return kind is not None and (kinds.is_list(kind) or kinds.is_large_list(kind))


def value_at(row: object, column: str) -> Any:
    """The value of a column, or of a struct's field, in a row of Python objects; None if one is missing.

    Raises ValueError, with the object of "has", if a value with fields is not a struct: rows of JSON may differ.
    """
    names = column.split(".")
    for depth, name in enumerate(names):
        if not isinstance(row, dict | None):
            raise ValueError(f"a value of `{'.'.join(names[:depth])}` that is no struct with the field {name}")
        row = row.get(name) if row is not None else None
    return row
