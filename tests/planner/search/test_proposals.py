"""Searches for layouts: what is proposed passes the checks, fits, is what its overrides say, and is in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.backends.families.registry import model_shape
from dagrl.backends.fit import place
from dagrl.backends.megatron.planning.layouts import RECOMPUTE, MegatronLayout, parallels
from dagrl.backends.sglang.layouts import layouts
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.planner.cost.costs import PipelineCosts
from dagrl.planner.cost.estimate import estimate_step
from dagrl.planner.cost.lengths import Assumed
from dagrl.planner.search.proposals import Proposal, search
from dagrl.planner.search.space import Cluster, cluster_of, placings
from dagrl.planner.showing.report import report
from dagrl.validation import CheckedPipeline, check_file

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
DENSE, MIXTURE = TEMPLATES / "qwen3_8b_megatron.yaml", TEMPLATES / "qwen3_30b_a3b_8gpu.yaml"
PIPELINES = {path: load_pipeline(path).pipeline for path in (DENSE, MIXTURE)}
FEWER = ("data.prompts_per_step=64",)


def checked(path: Path, overrides: Sequence[str] = ()) -> CheckedPipeline:
    return check_file(path, overrides, with_files=False)


@pytest.fixture(scope="module")
def found() -> list[Proposal]:
    return search(checked(DENSE, FEWER), Cluster(1, 4, "H200"), assumed=Assumed(response_tokens=500))


def test_proposals_are_in_order_and_of_several_kinds(found: list[Proposal]) -> None:
    assert len(found) == 5
    steps = [proposal.estimate.step_s for proposal in found]
    assert steps == sorted(steps)
    assert len({proposal.placing.together for proposal in found}) == 2, "together and apart are both shown"


def test_a_proposal_pasted_behind_a_call_is_what_was_estimated(found: list[Proposal]) -> None:
    for proposal in found:
        checked = check_file(DENSE, [*FEWER, *proposal.overrides], with_files=False)
        placed = place(checked.loaded.pipeline, checked.graph)
        pipeline = placed.pipeline
        assert sum(group.ranks for group in pipeline.groups.values()) == 4
        assert placed.fit is not None and not placed.fit.problems
        costs = PipelineCosts(pipeline, placed.plan, placed.fit.shape, assumed=Assumed(response_tokens=500))
        assert estimate_step(costs).step_s == pytest.approx(proposal.estimate.step_s)


def test_more_of_the_gpus_that_there_are_make_a_step_shorter(found: list[Proposal]) -> None:
    twice = search(checked(DENSE, FEWER), Cluster(1, 8, "H200"), assumed=Assumed(response_tokens=500), top=1)[0]
    assert twice.estimate.step_s < found[0].estimate.step_s


def test_nothing_is_proposed_if_nothing_fits() -> None:
    assert search(checked(MIXTURE), Cluster(1, 1), gpu="L4") == []


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="backend hf"):
        search(checked(TEMPLATES / "tiny_grpo.yaml"), Cluster(1, 2))
    sampled = ("nodes.update=null", "nodes.ref=null", "nodes.advantage=null", "engines.reference=null")
    with pytest.raises(ValueError, match="nothing is trained, and layouts are ranked by steps of training"):
        search(checked(DENSE, (*sampled, "engines.actor=null", "engines.generator.weights_from=null")), Cluster(1, 2))


LEARNED = (
    *("data.responses=[solution]", "data.max_response_tokens=1024", "engines.reference=null"),
    *("nodes.ref=null", "nodes.advantage=null", "nodes.update={op: sft, engine: actor}"),
)


def test_training_on_the_data_set_has_all_gpus() -> None:
    no_rollout = ("nodes.rollout=null", "nodes.reward=null", "engines.generator=null")
    found = search(checked(DENSE, (*LEARNED, *no_rollout)), Cluster(1, 4, "H200"), top=3)
    assert len(found) == 3
    for proposal in found:
        assert proposal.server is None and proposal.placing.together
        assert load_pipeline(DENSE, [*LEARNED, *no_rollout, *proposal.overrides]).pipeline.groups["gpu"].ranks == 4
    # Servers that sample in validation alone are laid out beside the trainer, not apart from it.
    validating = search(checked(DENSE, LEARNED), Cluster(1, 4, "H200"), top=3)
    assert all(proposal.server is not None and proposal.placing.together for proposal in validating)
    assert validating[0].trainer.layout == found[0].trainer.layout
    kinds = [(proposal.trainer, proposal.server.layout) for proposal in validating if proposal.server]
    assert len(set(kinds)) == len(kinds)


def test_batches_that_grow_with_machines_are_estimated_as_they_will_be() -> None:
    growing = ("data.prompts_per_step=null", "data.prompts_per_node=16")
    best = search(checked(DENSE, growing), Cluster(2, 4, "H200"), top=1)[0]
    pipeline = load_pipeline(DENSE, [*growing, *best.overrides]).pipeline
    assert pipeline.data.prompts_per_step == 16 * best.placing.groups[best.placing.trainers].nodes
    assert best.estimate.response_tokens == pipeline.data.prompts_per_step * 8 * 1024


CLUSTERS = st.sampled_from([Cluster(1, 2), Cluster(1, 8, "H200"), Cluster(4, 8), Cluster(3, 4)])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([DENSE, MIXTURE]), CLUSTERS, st.sampled_from(RECOMPUTE), st.booleans(), st.data())
def test_a_choice_means_the_same_as_its_overrides(
    path: Path, cluster: Cluster, recompute: str, offload: bool, data: st.DataObject
) -> None:
    given_ = PIPELINES[path]
    shape = model_shape(given_.model)
    placing = data.draw(st.sampled_from(list(placings(cluster))))
    parallel = data.draw(st.sampled_from(list(parallels(shape, placing.groups[placing.trainers], 3072, 1024))))
    trainer = MegatronLayout(parallel, recompute, offload, data.draw(st.sampled_from([8192, 32768])))
    server = data.draw(st.sampled_from(list(layouts([shape], placing.groups[placing.generators]))))
    overrides = [*placing.overrides(given_), *trainer.overrides(given_), *server.overrides(given_)]
    checked = check_file(path, overrides, with_files=False)
    placed = load_pipeline(path, list(placing.overrides(given_))).pipeline
    assert plain(checked.loaded.pipeline) == plain(server.applied(trainer.applied(placed)))


def plain(pipeline: Pipeline) -> dict[str, object]:
    """All that a pipeline says, but where its data lie."""
    return pipeline.model_dump(exclude={"data"})


def test_a_search_for_the_files_own_gpus_finds_nothing_slower_than_the_file() -> None:
    overrides = ("groups.gpu.gpu=H200", "data.prompts_per_step=16")
    own = report(MIXTURE, overrides)
    costs = PipelineCosts(own.pipeline, own.fit.plan, own.fit.shape)
    best = search(checked(MIXTURE, overrides), cluster_of(own.pipeline), top=1)[0]
    assert best.estimate.step_s <= estimate_step(costs).step_s
    assert isinstance(best.trainer, MegatronLayout)
    assert best.trainer.parallel.expert_model_parallel_size > 1


@pytest.mark.parametrize(
    ("call", "cluster"),
    [
        ({}, (1, 8, None)),
        ({"gpus": 4, "gpu": "H200"}, (1, 4, "H200")),
        ({"gpus": 32}, (4, 8, None)),
        ({"nodes": 3}, (3, 8, None)),
        ({"nodes": 2, "gpus_per_node": 4}, (2, 4, None)),
    ],
)
def test_the_cluster_of_a_call(call: dict[str, Any], cluster: tuple[int, int, str | None]) -> None:
    assert cluster_of(PIPELINES[DENSE], **call) == Cluster(*cluster)


@pytest.mark.parametrize(
    ("groups", "cluster"),
    [
        ("{a: {gpus_per_node: 5}, b: {gpus_per_node: 3}}", (1, 8)),
        ("{a: {gpus_per_node: 8}, b: {gpus_per_node: 8}}", (2, 8)),
        ("{a: {nodes: 2, gpus_per_node: 8}, b: {nodes: 1, gpus_per_node: 8}}", (3, 8)),
        ("{a: {nodes: 2, gpus_per_node: 8}, b: {gpus_per_node: 2}, c: {gpus_per_node: 6}}", (3, 8)),
        ("{a: {gpus_per_node: 4, gpu: L40S}, b: {cpus_per_node: 2}}", (1, 4, "L40S")),
    ],
)
def test_the_cluster_of_a_files_groups(groups: str, cluster: tuple[Any, ...]) -> None:
    pipeline = load_pipeline(DENSE, [f"groups={groups}"]).pipeline
    assert cluster_of(pipeline) == Cluster(*cluster)
