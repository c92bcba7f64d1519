"""Orders as pipelines describe them."""

from __future__ import annotations

import json

import pytest

from dagrl.config.schema import SourceSpec
from dagrl.data.order import make
from dagrl.data.sources import open_source


@pytest.mark.parametrize("other", ["a text", 5, [1], True])
def test_a_row_without_a_struct_to_sort_by_is_named(tmp_path, monkeypatch, other) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"info": each}) + "\n" for each in ({"level": 1}, other)))
    source = open_source("sums", SourceSpec(path=path))
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has a value of `info` that is no struct with the field level; "):
        make._column(source, "info.level")
