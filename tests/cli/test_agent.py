"""`dagrl agent try`: the template's agent against a real generator, and calls that cannot work."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from dagrl.cli import main


@pytest.fixture(autouse=True)
def no_module_left() -> Iterator[None]:
    """Other tests import the module of this name beside a copy of the template."""
    yield
    sys.modules.pop("adding", None)


def test_one_conversation_is_printed(capsys) -> None:
    assert main(["agent", "try", "tiny_agent", "--row", "3"]) == 0
    out = capsys.readouterr().out
    assert "-- sequence 1: 4 tokens of prompt" in out
    assert "-- turn 1 of the policy: " in out
    assert "\nreward 0.0\n" in out or "\nreward 1.0\n" in out
    assert main(["agent", "try", "tiny_agent", "--row", "99"]) == 2
    assert "has the rows 0 to 24, and no row 99" in capsys.readouterr().err
    assert main(["agent", "try", "tiny_grpo"]) == 2
    assert "no rollout of this pipeline has an `agent`" in capsys.readouterr().err


def test_a_generator_runs_in_its_environment(capfd) -> None:
    there = f"engines.generator.environment={sys.prefix}"
    assert main(["agent", "try", "tiny_agent", there, "--row", "3"]) == 0
    assert "-- turn 1 of the policy: " in capfd.readouterr().out
    assert "adding" not in sys.modules, "the agent ran in another process"
