"""docs/algorithms.md is made from the code, and says nothing that the code, the templates and the tests do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from dagrl.algorithms.catalogue.advantages import ESTIMATORS
from dagrl.algorithms.catalogue.document import CHAPTERS, document, place_of_test
from dagrl.algorithms.catalogue.elsewhere import DIFFERENCES, ELSEWHERE
from dagrl.algorithms.catalogue.entry import Chapter, Entry
from dagrl.algorithms.catalogue.policies import AGGREGATIONS, LOSSES
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import (
    AdvantageNode,
    Aggregation,
    CriticNode,
    DpoNode,
    Estimator,
    FilterNode,
    LossSpec,
    Pipeline,
    PolicyForm,
    SftNode,
    UpdateNode,
)

REPOSITORY = Path(__file__).parents[2]
ENTRIES = [(chapter, entry) for chapter in CHAPTERS for entry in chapter.entries]
ids = [f"{chapter.title}: {entry.name}" for chapter, entry in ENTRIES]


def test_docs_are_up_to_date() -> None:
    written = (REPOSITORY / "docs" / "algorithms.md").read_text()
    assert written == document(), "run: python -m dagrl.algorithms.catalogue > docs/algorithms.md"


@pytest.mark.parametrize(
    ("chapter", "schema"),
    [
        (ESTIMATORS, Estimator),
        (LOSSES, PolicyForm),
        (AGGREGATIONS, Aggregation),
    ],
)
def test_nothing_that_the_file_may_name_is_missing(chapter: Chapter, schema: object) -> None:
    names = {entry.name.partition(",")[0] for entry in chapter.entries}
    assert names == set(get_args(schema))


@pytest.mark.parametrize("row", [*ELSEWHERE, *DIFFERENCES], ids=lambda row: row[0])
def test_what_has_a_name_elsewhere_is_here(row: tuple[str, ...]) -> None:
    key, _, value = row[0].partition(", ")[0].partition(": ")
    known = {
        "estimator": get_args(Estimator),
        "policy": get_args(PolicyForm),
        "op": [
            field for kind in (FilterNode, SftNode, DpoNode) for field in get_args(kind.model_fields["op"].annotation)
        ],
    }
    if key in known:
        assert value in known[key]
    else:
        assert key in {**AdvantageNode.model_fields, **UpdateNode.model_fields, **LossSpec.model_fields}


def test_differences_name_frameworks_that_the_page_knows() -> None:
    known = {"verl", "siiRL", "slime", "ROLL", "Trinity-RFT"}
    assert {name for _, where, _ in DIFFERENCES for name in where.split(", ")} <= known


@pytest.mark.parametrize(("chapter", "entry"), ENTRIES, ids=ids)
def test_sources_are_those_of_the_code(chapter: Chapter, entry: Entry) -> None:
    told = " ".join((entry.function.__doc__ or "").split())
    for source in filter(None, entry.source.split("; ")):
        # A name may stand before a paper in parentheses.
        parts = [source, *re.findall(r"arXiv .*", source)]
        assert any(part in told for part in parts), f"{entry.function.__qualname__} does not say {source!r}"


@pytest.mark.parametrize(("chapter", "entry"), ENTRIES, ids=ids)
def test_tests_are_there(chapter: Chapter, entry: Entry) -> None:
    file, name = place_of_test(entry)
    assert f"def {name}(" in (REPOSITORY / file).read_text()


def advantage(use: Callable[[AdvantageNode], object]) -> Callable[[Pipeline], bool]:
    return lambda pipeline: any(isinstance(node, AdvantageNode) and use(node) for node in pipeline.nodes.values())


def update(use: Callable[[UpdateNode], object]) -> Callable[[Pipeline], bool]:
    return lambda pipeline: any(isinstance(node, UpdateNode) and use(node) for node in pipeline.nodes.values())


def uses(chapter: Chapter, name: str) -> Callable[[Pipeline], bool]:
    """Whether a pipeline uses a formula."""
    if chapter is ESTIMATORS:
        return advantage(lambda node: node.estimator == name)
    if chapter is LOSSES:
        return update(lambda node: node.loss.policy == name)
    if chapter is AGGREGATIONS:
        return update(lambda node: node.loss.weighting == name)
    match name:
        case "k1" | "k2" | "k3":
            return update(lambda node: node.loss.kl_coef and node.loss.kl_estimator == name)
        case "kl_in_reward" | "overlong_buffer" | "length_reward" | "cosine_reward":
            return advantage(lambda node: getattr(node, name))
        case "critic":
            return lambda pipeline: any(isinstance(node, CriticNode) for node in pipeline.nodes.values())
        case "sft":
            return lambda pipeline: any(isinstance(node, SftNode) for node in pipeline.nodes.values())
        case "dpo, loss: sigmoid":
            return lambda pipeline: any(
                isinstance(node, DpoNode) and node.loss == "sigmoid" for node in pipeline.nodes.values()
            )
        case "sft_coef":
            return update(lambda node: node.loss.sft_coef)
    raise AssertionError(f"how does a template use {name}?")


@pytest.mark.parametrize(
    ("chapter", "entry"), [pair for pair in ENTRIES if pair[1].template], ids=lambda each: getattr(each, "name", "")
)
def test_templates_are_about_it(chapter: Chapter, entry: Entry) -> None:
    pipeline = load_pipeline(REPOSITORY / "dag_templates" / f"{entry.template}.yaml").pipeline
    assert uses(chapter, entry.name)(pipeline)
