"""docs/algorithms.md agrees with the schema, the templates, the tests and the docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import (
    AdvantageNode,
    Aggregation,
    CovarianceNode,
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
from dagrl.config.schema.nodes.advantage import KlValue
from dagrl.config.schema.nodes.update import KlEstimator

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "algorithms.md").read_text()
ESTIMATORS, POLICIES, AGGREGATIONS, DIVERGENCES = (
    "Advantages",
    "Policy losses",
    "From tokens to a number",
    "Divergence and entropy",
)


class Row(NamedTuple):
    """A row of a table of formulas."""

    chapter: str
    name: str
    source: str
    template: str
    test: str


def cells(chapter: str) -> Iterator[list[str]]:
    for line in chapter.splitlines():
        if line.startswith("| `"):
            # A bar inside of code separates no cells.
            yield [cell.strip() for cell in re.split(r" \|(?= |$)", line[1:])]


CHAPTERS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ELSEWHERE = [row[0].strip("`") for row in cells(CHAPTERS.pop("Names elsewhere"))]
ROWS = [
    Row(title, row[0].strip("`"), row[2], row[3], row[4])
    for title, chapter in CHAPTERS.items()
    for row in cells(chapter)
]


def names(chapter: str) -> set[str]:
    """The first part of each name; `k1+, k3+` is two names."""
    return {row.name.partition(", dual_clip")[0] for row in ROWS if row.chapter == chapter}


@pytest.mark.parametrize(
    ("chapter", "literal"), [(ESTIMATORS, Estimator), (POLICIES, PolicyForm), (AGGREGATIONS, Aggregation)]
)
def test_every_name_of_the_schema_is_on_the_page(chapter: str, literal: object) -> None:
    assert names(chapter) == set(get_args(literal))


def test_every_kl_estimator_is_on_the_page() -> None:
    written = {name for names_of_row in names(DIVERGENCES) for name in names_of_row.split(", ")}
    estimators = set(get_args(KlEstimator)) | set(get_args(KlValue))
    others = {"kl_in_reward", "target_kl", "entropy_coef", "op: covariance", "second_moment", "top_entropy"}
    assert written == {name for name in estimators if isinstance(name, str)} | others


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_beside_those_of_other_frameworks_exist(name: str) -> None:
    key, _, value = name.partition(", ")[0].partition(": ")
    ops = [
        op
        for kind in (FilterNode, SftNode, DpoNode, CovarianceNode)
        for op in get_args(kind.model_fields["op"].annotation)
    ]
    known = {"estimator": get_args(Estimator), "policy": get_args(PolicyForm), "op": ops}
    if key in known:
        assert value in known[key]
    else:
        assert key in {**AdvantageNode.model_fields, **UpdateNode.model_fields, **LossSpec.model_fields}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_named_test_exists(row: Row) -> None:
    ((name, file),) = re.findall(r"\[(.*)\]\(\.\./(.*)\)", row.test)
    assert f"def test_{name.replace(' ', '_')}(" in (REPOSITORY / file).read_text()


def test_papers_are_those_that_docstrings_name() -> None:
    code = "".join(file.read_text() for file in (REPOSITORY / "dagrl").rglob("*.py"))
    papers = {paper for row in ROWS for paper in re.findall(r"\[arXiv ([\d.]+)\]", row.source)}
    assert len(papers) > 20
    assert {paper for paper in papers if paper not in code} == set()


@pytest.mark.parametrize("row", [row for row in ROWS if row.template], ids=lambda row: row.name)
def test_the_linked_template_uses_it(row: Row) -> None:
    ((_, file),) = re.findall(r"\[(\w+)\]\(\.\./(.*)\)", row.template)
    assert uses(load_pipeline(REPOSITORY / file).pipeline, row)


def uses(pipeline: Pipeline, row: Row) -> bool:
    """Whether a pipeline uses a formula."""
    nodes = pipeline.nodes.values()
    advantages = [node for node in nodes if isinstance(node, AdvantageNode)]
    losses = [node.loss for node in nodes if isinstance(node, UpdateNode)]
    match row.chapter, row.name:
        case "Advantages", name:
            return any(node.estimator == name for node in advantages)
        case "Policy losses", name:
            return any(loss.policy == name for loss in losses)
        case "From tokens to a number", name:
            return any(loss.weighting == name for loss in losses)
        case _, "k1" | "k2" | "k3":
            return any(loss.kl_coef and loss.kl_estimator == row.name for loss in losses)
        case _, "kl_in_reward":
            return any(node.kl_in_reward for node in advantages)
        case _, "distillation: {coef}":
            return any(node.distillation for node in advantages)
        case _, "divergence: jsd":
            return any(loss.distillation and loss.distillation.divergence == "jsd" for loss in losses)
        case _, "overlong_buffer":
            return any(node.overlong_buffer for node in advantages)
        case _, "critic":
            return any(isinstance(node, CriticNode) for node in nodes)
        case _, "sft":
            return any(isinstance(node, SftNode) for node in nodes)
        case _, "dpo, loss: sigmoid":
            return any(isinstance(node, DpoNode) and node.loss == "sigmoid" for node in nodes)
        case _, "sft_coef":
            return any(loss.sft_coef for loss in losses)
    raise AssertionError(f"how does a template use {row.name}?")
