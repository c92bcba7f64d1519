"""The reference of the pipeline file is the one in docs/."""

from __future__ import annotations

import inspect
from pathlib import Path

from dagrl.config import schema
from dagrl.graph.reference import reference

DOCUMENT = Path(__file__).parents[2] / "docs" / "pipeline.md"


def test_docs_are_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), "run: python -m dagrl.graph.reference > docs/pipeline.md"


def test_every_section_of_the_schema_has_a_heading_and_a_meaning_for_every_key() -> None:
    abstract = (schema.Section, schema.NodeBase, schema.TrainingNode, schema.DemonstrationNode, schema.EngineSpec)
    sections = [
        each
        for each in vars(schema).values()
        if isinstance(each, type) and issubclass(each, schema.Section) and each not in abstract
    ]
    for section in sections:
        assert section.__doc__ is not None
        assert inspect.cleandoc(section.__doc__) in reference()
        undocumented = [name for name, field in section.model_fields.items() if not field.description]
        assert undocumented == [], section.__name__
