"""The tables of docs/migration.md and those of the importer name the same keys."""

import re
from pathlib import Path

import pytest

import dagrl.importing
from dagrl.importing.importer import import_file
from dagrl.importing.registry import FRAMEWORKS

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "migration.md").read_text()
MODULES = Path(dagrl.importing.__file__).parent
SECTIONS = {
    "verl and siiRL": "verl",
    "slime": "slime",
    "ROLL": "roll",
    "Trinity-RFT": "trinity",
}
# Values, the user's own classes, and names that the page abbreviates.
OTHERS = {
    *("AgentLoopBase", "Workflow", "..._in_infer", "..._forward", "ref.log_prob_...", "NAME", "group_filter_cls"),
    *("sft", "dpo", "mix", "explore", "train", "both", "memory", "sequential"),
    *("actor.megatron.*_parallel_size", "critic.*"),
}


def left_cells(section: str) -> list[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    return [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]


@pytest.mark.parametrize("section", SECTIONS)
def test_each_key_of_the_page_has_a_rule(section):
    name = SECTIONS[section]
    source = "".join(path.read_text() for path in (MODULES / name).glob("*.py"))
    words = set(re.findall(r"[\w-]+", source + (MODULES / "engines.py").read_text()))

    def is_known(key):
        places = [key, *(f"{parent}.{key}" for parent in ("actor_train", "rewards.math", "trainer"))]
        last = re.split(r"[.\s]", key)[-1]
        return last in words or last.lstrip("-") in words or any(FRAMEWORKS[name].rule_of(each) for each in places)

    keys = {re.split(r"[:=]", each)[0] for cell in left_cells(section) for each in re.findall(r"`([^`]+)`", cell)}
    assert len(keys) > 30
    assert {key for key in keys - OTHERS if not is_known(key)} == set()


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_names_the_keys_that_rules_write(section, sources):
    files = [path for path in sources.glob(f"{SECTIONS[section]}_*") if "config" not in path.name]
    targets = {target for path in files for target in import_file(path).translation.origins}
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    words = set(re.findall(r"\w+", text))
    assert {target for target in targets if not words & set(target.split(".")[1:] or [target])} == set()
