"""Tables of tested fields agree with the config classes of the installed libraries."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import pytest
from pydantic import TypeAdapter

from dagrl.backends.megatron.fields import DdpFields, OptimizerFields, TransformerFields
from dagrl.backends.sglang.fields import ServerFields
from dagrl.config.schema.library_fields import LibraryFields
from dagrl.model_files.library_classes import fields_of_class, source_of


def check_table(table: type[LibraryFields], kinds: Mapping[str, Any], given: Any = lambda kind, value: value) -> None:
    """The table has the names, order and types of a class whose fields have these kinds."""
    assert [name for name in kinds if name in table.model_fields] == list(table.model_fields)
    assert set(table.refused) <= set(kinds)
    assert not set(table.refused) & set(table.model_fields)
    for name, field in table.model_fields.items():
        adapter = TypeAdapter(kinds[name], config={"arbitrary_types_allowed": True})
        for value in samples(field.annotation):
            # A whole number may stand for a float.
            adapter.validate_python(given(kinds[name], value), strict=type(value) is not int)


def samples(annotation: Any) -> list[Any]:
    """A few values of a type; all of a literal."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return samples(arguments[0])
    if origin is Literal:
        return list(arguments)
    if origin is list:
        return [samples(arguments[0])]
    if annotation in (bool, int, float, str):
        return [annotation(1)]
    return [value for each in arguments for value in samples(each)]


@pytest.mark.parametrize("table", [TransformerFields, OptimizerFields, DdpFields])
def test_megatron(table):
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    from dagrl.backends.megatron.engine.config import _value

    classes = dict(
        zip(
            (TransformerFields, OptimizerFields, DdpFields),
            (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig),
            strict=True,
        )
    )
    check_table(table, {field.name: field.type for field in dataclasses.fields(classes[table])}, _value)


def test_sglang():
    """ServerArgs is read as text: importing it takes long."""
    source = source_of("sglang", "srt/server_args.py")
    if source is None:
        pytest.skip("SGLang is not installed")
    start = source.find("\nclass ServerArgs:")
    written = fields_of_class(source[start : source.find("\n    def ", start)], "ServerArgs")
    kinds: dict[str, Any] = {}
    for name, text in written.items():
        kinds[name] = Any
        annotation = ast.parse(text, mode="eval").body
        if name in ServerFields.model_fields:
            # A[type, Arg(choices=[...], ...), ...]
            assert isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple), name
            names = {"Optional": Optional, "List": list, "Literal": Literal}
            kinds[name] = eval(ast.unparse(annotation.slice.elts[0]), names)
            for word in ast.walk(annotation):
                if isinstance(word, ast.keyword) and word.arg == "choices" and isinstance(word.value, ast.List):
                    kinds[name] = Literal[tuple(ast.literal_eval(word.value))]
    check_table(ServerFields, kinds)
