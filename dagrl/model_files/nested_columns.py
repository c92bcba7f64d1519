"""Columns of a prompt file, and fields of its structs, such as ``extra_info.answer``: their types and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def column_type(schema: pa.Schema, column: str) -> pa.DataType | None:
    """The type of a column, or of a struct's field; None if it does not exist."""
    import pyarrow.types as kinds

    name, *fields = column.split(".")
    found = schema.field(name).type if name in schema.names else None
    for field in fields:
        if found is None or not kinds.is_struct(found) or found.get_field_index(field) < 0:
            return None
        found = found.field(field).type
    return found


def is_list(kind: pa.DataType | None) -> bool:
    """Whether a type is that of lists; polars writes large lists."""
    import pyarrow.types as kinds

    return kind is not None and (kinds.is_list(kind) or kinds.is_large_list(kind))


def value_at(row: Any, column: str) -> Any:
    """The value of a column, or of a struct's field, in a row of Python objects; None if one is missing."""
    for name in column.split("."):
        row = row.get(name) if row is not None else None
    return row
