"""Importing without a look for garbage, and without what nobody needs."""

import gc
import importlib
import sys

import pytest

from dagrl.imports import lean_imports


def test_a_hidden_package_is_not_there_in_the_block_and_is_after_it():
    with lean_imports("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    assert importlib.util.find_spec("this") is not None


def test_what_was_imported_before_stays():
    with lean_imports("gc"):
        assert importlib.import_module("gc") is gc
    assert sys.modules["gc"] is gc


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_in_the_block_alone(collects: bool):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError), lean_imports():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_what_is_imported_for_good_is_not_looked_at_again():
    mine = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    with lean_imports(for_good=True):
        pass
    assert gc.get_freeze_count() >= before + len(mine)
