"""Functions that are read from their source answer what imported ones answer."""

import inspect
import sys

import pytest

from dagrl.plugins.custom import load_function
from dagrl.plugins.declarations import FIELDS, checked_traits, declared, fields_of, rule_columns
from dagrl.plugins.isolation import ask, without_imports
from dagrl.plugins.source import function_in_source

SOURCE = """
import sys
import dagrl
from json import loads
sys.imported = getattr(sys, "imported", 0) + 1


def plain(response, answer, *, weight=1.0, **rest): ...


@dagrl.reward(concurrency=4)
def many(prompt, response=None): ...


@dagrl.node(reads=["reward"], writes=["other"], scope="group")
def op(batch, /, *more): ...


try:
    from nowhere import fast
except ImportError:
    def fast(response): ...


async def later(response): ...


class Thing: ...


made = loads
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pack").mkdir()
    for name in ("source_mine.py", "pack/__init__.py", "pack/inner.py"):
        (tmp_path / name).write_text(SOURCE)
    return tmp_path


def test_signatures_and_declarations_are_those_of_the_imported_module(folder):
    for name in ("plain", "many", "op", "fast"):
        read = function_in_source(f"source_mine:{name}", folder)
        real = load_function(f"source_mine:{name}", folder)
        for one, other in zip(
            inspect.signature(read).parameters.values(), inspect.signature(real).parameters.values(), strict=True
        ):
            assert (one.name, one.kind, one.default is one.empty) == (
                other.name,
                other.kind,
                other.default is one.empty,
            )
        assert checked_traits(read, name) == checked_traits(real, name)
    read = function_in_source("source_mine:op", folder)
    assert declared(read, "x", "node") == declared(load_function("source_mine:op", folder), "x", "node")


@pytest.mark.parametrize("module", ["source_mine", "pack", "pack.inner"])
def test_nothing_is_imported(folder, module):
    sys.imported = 0
    with without_imports():
        assert tuple(ask(f"{module}:plain", fields_of, {"weight": 2.0}, folder=folder)) == FIELDS
        assert tuple(ask(f"{module}:fast", fields_of, {}, folder=folder)) == ("response",)
        assert ask(f"{module}:many", rule_columns, {}, folder=folder) == ("prompt",)
        assert tuple(ask(f"{module}:made", fields_of, {}, folder=folder)) == FIELDS  # Only Python knows its parameters.
        for name, said in (("none", "no function"), ("later", "async")):
            with pytest.raises(ValueError, match=said):
                ask(f"{module}:{name}", fields_of, {}, folder=folder)
        with pytest.raises(ValueError, match="no module"):
            ask("pack.none:plain", fields_of, {}, folder=folder)
    assert sys.imported == 0
    assert not {"pack", "pack.inner"} & sys.modules.keys()


@pytest.mark.parametrize(
    "text", [b"def f(:\n", b"\xff\n", b"(" * 9000, b"def f(x): pass\n" + b"x = " + b"-" * 9999 + b"1\n"]
)
def test_sources_that_are_no_python_are_refused(tmp_path, text):
    (tmp_path / "source_bad.py").write_bytes(text)
    with pytest.raises(ValueError, match="cannot be read"):
        function_in_source("source_bad:f", tmp_path)
