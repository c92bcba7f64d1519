"""Fields of a library's config classes in an engine's section: a table of tested ones, and ``extra:`` for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, PlainSerializer

from dagrl.config.errors import listed, nearest
from dagrl.config.schema.section import Section

UNSET: Any = None
"""Default of the fields in a table: the library's own default, or dagrl's where the documentation names one."""


class LibraryFields(Section):
    """The tested fields of one config class, by the library's names and in its order.

    Keys in `refused` are set by dagrl itself or follow from another key; ``extra:`` cannot set them either.
    """

    library_class: ClassVar[tuple[str, str, str]]
    """Package, file below it, and name of the config class."""
    called_elsewhere: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Names of fields in other libraries -> names here; ``section.field`` for a field of another section."""


def meant_fields(table: type[LibraryFields], name: str, known: Iterable[str] = ()) -> str:
    """Suggest tested or `known` fields for an unknown name: ``did you mean `lr`?``; empty if none is similar."""
    near = nearest(name, [*table.model_fields, *known])
    meant = table.called_elsewhere.get(name, (near,) if near else ())
    return f"did you mean {listed(meant)}?" if meant else ""


if TYPE_CHECKING:
    type GivenFields[Fields: LibraryFields] = dict[str, Any]
else:

    class GivenFields:
        """``GivenFields[Table]``: the fields that a file sets, checked by the table, as a plain mapping."""

        def __class_getitem__(cls, table):
            def as_mapping(section):
                return {name: getattr(section, name) for name in table.model_fields if name in section.model_fields_set}

            def without_extra(given):
                return {name: value for name, value in given.items() if name in table.model_fields}

            return Annotated[table, AfterValidator(as_mapping), PlainSerializer(without_extra)]


def add_extra[Spec: Section](spec: Spec) -> Spec:
    """Add the fields under ``extra:`` to their sections, beside the tested ones."""
    for section, fields in spec.__dict__["extra"].items():
        spec.__dict__[section] = {**fields, **spec.__dict__[section]}
    return spec
