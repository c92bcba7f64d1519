"""docs/pipeline.md is the reference of the schema."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from dagrl.config import schema

DOCS = Path(__file__).parents[1] / "docs"


def test_docs_are_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_pipeline.py"], capture_output=True, text=True, check=True
    ).stdout
    assert (DOCS / "pipeline.md").read_text() == made, "run: python docs/make_pipeline.py > docs/pipeline.md"


def test_every_section_of_the_schema_has_a_heading_and_a_meaning_for_every_key() -> None:
    abstract = (
        schema.Section,
        schema.SourceSpec,
        schema.NodeBase,
        schema.PackingNode,
        schema.SelectiveNode,
        schema.TrainingNode,
        schema.DemonstrationNode,
    )
    sections = [
        each
        for each in vars(schema).values()
        if isinstance(each, type) and issubclass(each, schema.Section) and each not in (*abstract, schema.EngineSpec)
    ]
    page = (DOCS / "pipeline.md").read_text()
    for section in sections:
        assert section.__doc__ is not None
        assert inspect.cleandoc(section.__doc__) in page
        undocumented = [name for name, field in section.model_fields.items() if not field.description and name != "op"]
        assert undocumented == [], section.__name__
