"""What stands before a filter, what behind it, and how that is shown."""

from __future__ import annotations

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema.rounds import expected_rounds, over_sampled, prompts_begun, prompts_per_round
from dagrl.graph.drawing.draw import draw_mermaid, draw_svg, draw_text, stages_of
from dagrl.graph.inference import build_graph
from dagrl.validation import check_file
from dagrl.validation.summary import summarize

KEEP = "nodes.keep={op: filter}"


@pytest.fixture
def pipeline_of(project):
    return lambda *overrides: load_pipeline(project.pipeline(), overrides).pipeline


def test_a_node_that_the_filter_does_not_need_runs_after_it(pipeline_of):
    graph = build_graph(pipeline_of(KEEP))
    assert (graph.filter, graph.in_rounds) == ("keep", {"prompts", "rollout", "reward", "keep"})
    assert graph.order == ("prompts", "rollout", "reward", "keep", "ref", "advantage", "update", "samples")
    # All others come behind one of these.
    assert graph.select_from == ("ref", "advantage")
    assert graph.validation.filter is None
    assert "keep" not in graph.validation.nodes


def test_without_a_filter_nothing_is_in_rounds(pipeline_of):
    graph = build_graph(pipeline_of())
    assert (graph.filter, graph.in_rounds, graph.select_from) == (None, frozenset(), ())


def test_drawings_show_who_works_on_the_groups_that_pass(pipeline_of):
    graph = build_graph(pipeline_of(KEEP))
    assert stages_of(graph)["ref"] == stages_of(graph)["keep"] + 1
    text = draw_text(graph)
    assert text.count("    keep -> the selected groups\n") == 2
    assert "keep  (filter on host)\n    prompts -> group_id\n    reward -> reward\n" in text
    assert 'n_keep -->|"the selected groups"| n_ref' in draw_mermaid(graph)
    assert draw_svg(graph).count("the selected groups") == 2
    assert "groups that pass" not in draw_text(build_graph(pipeline_of()))


def test_a_summary_says_what_a_filter_is_for(project):
    summary = summarize(check_file(project.pipeline(), [KEEP]))
    assert "keep       filter on host        group_id, reward -> the selected groups\n" in summary


@pytest.mark.parametrize(
    ("overrides", "begun", "later"),
    [
        ([], 8, 3),
        ([KEEP], 8, 3),
        ([KEEP, "nodes.keep.prompts_per_round=12"], 12, 3),
        # As many on top of a later round as of the first.
        ([KEEP, "nodes.rollout.over_sampling_batch_size=10"], 10, 5),
        ([KEEP, "nodes.rollout.over_sampling_batch_size=20", "nodes.keep.prompts_per_round=12"], 20, 11),
    ],
)
def test_how_many_prompts_a_round_begins(pipeline_of, overrides, begun, later):
    pipeline = pipeline_of(*overrides)
    assert (prompts_begun(pipeline), prompts_begun(pipeline, 3)) == (begun, later)
    assert begun - over_sampled(pipeline) == prompts_per_round(pipeline)


@pytest.mark.parametrize(("prompts", "rounds"), [(36, 5), (37, 6)])
def test_rounds_that_fill_a_step_exactly_are_not_followed_by_one_more(pipeline_of, prompts, rounds):
    """48 * 0.15 = 7.2 prompts pass in each round, and 5 * 7.2 = 36; in floats, 0.15 * 48 is less than that."""
    keep = "nodes.keep={op: filter, prompts_per_round: 48, expected_kept_fraction: 0.15}"
    assert expected_rounds(pipeline_of(keep, f"data.prompts_per_step={prompts}")) == rounds
