"""When the log-probs before the update are those of the update itself, and when they are not."""

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.drawing.draw import draw_mermaid, draw_svg, draw_text
from dagrl.graph.inference import build_graph
from dagrl.graph.updates import hindrance
from dagrl.scheduler.placement import make_plan
from dagrl.validation import check_file
from dagrl.validation.summary import summarize

OLD = "nodes.old={op: logprob, engine: actor, write: old_logprob}"
REASON = "`update` takes one optimizer step for each batch, so the ratio is 1"


@pytest.fixture
def graph_of(project):
    def build(*overrides, edits=()):
        loaded = load_pipeline(project.pipeline(*edits), overrides)
        return build_graph(loaded.pipeline, loaded.folder)

    return build


def test_old_log_probs_of_a_single_step_are_skipped(graph_of):
    assert graph_of(OLD).skipped == {"old": REASON}
    assert graph_of(OLD, "nodes.update.mini_batch=8").skipped == {"old": REASON}


def test_they_are_not_computed_to_be_shown_with_samples(graph_of):
    graph = graph_of(OLD, "run.sample_logprobs=true")
    assert graph.skipped == {"old": REASON}
    assert {"rollout_logprob", "ref_logprob"} == {
        name for name in graph.working.nodes["samples"].inputs if "logprob" in name
    }
    assert "rollout_logprob" not in graph_of(OLD).nodes["samples"].inputs


def test_old_log_probs_are_skipped_for_older_samples_too(graph_of):
    assert graph_of(OLD, "schedule.max_staleness=2").skipped == {"old": REASON}


@pytest.mark.parametrize(
    "overrides",
    [
        [OLD, "nodes.update.mini_batch=4"],
        [OLD, "nodes.update.epochs=2"],
        [OLD, "engines.actor.lora={rank: 4, dropout: 0.1}"],
        # The reference's are another's, whatever they are called.
        ["nodes.ref.write=old_logprob", "nodes.update.loss={}"],
        [
            "nodes.old={op: logprob, engine: other, write: old_logprob}",
            "engines.other={backend: megatron, group: train}",
        ],
        # Something else reads them too.
        [OLD, "nodes.advantage.kl_in_reward={coef: 0.1}"],
        [OLD, "nodes.mine={op: 'reads_old:mine'}"],
        # They are those after other prompts.
        [
            "nodes.told={op: tell, demonstration: answer, max_prompt_tokens: 16}",
            "nodes.old={op: logprob, engine: actor, read: {prompt_tokens: teacher_prompt_tokens}, write: old_logprob}",
        ],
        # The update takes them for the reference's.
        ["nodes.old={op: logprob, engine: actor}", "nodes.update.read={ref_logprob: old.logprob}"],
    ],
    ids=lambda overrides: overrides[-1].partition("=")[0],
)
def test_they_are_kept_where_they_differ_or_are_read(project, graph_of, overrides):
    module = "import dagrl\n@dagrl.node(reads=['old_logprob'], writes=['gap'])\ndef mine(batch): ...\n"
    project.write("reads_old.py", module)
    graph = graph_of(*overrides)
    assert graph.skipped == {}
    assert list(graph.working.nodes) == list(graph.nodes)


def test_an_unread_node_has_only_its_warning(project):
    checked = check_file(project.folder / "p.yaml", ["nodes.extra={op: logprob, engine: actor}"])
    assert checked.graph.skipped == {}
    assert checked.warnings[0].code == "unread-node"


def test_the_plan_leaves_out_skipped_nodes(project, graph_of):
    graph = graph_of(OLD, "run.validate_first=true")
    assert graph.nodes["update"].inputs["old_logprob"].node == "old", "the graph shows it all the same"
    pipeline = load_pipeline(project.folder / "p.yaml", [OLD, "run.validate_first=true"]).pipeline
    plan = make_plan(pipeline, graph)
    assert "old" not in {task.node for task in plan.tasks}
    assert set(plan.task("update").inputs) >= {"advantage", "ref_logprob"}
    assert "old_logprob" not in plan.task("update").inputs
    without = make_plan(load_pipeline(project.folder / "p.yaml").pipeline, graph_of())
    assert [task for task in plan.tasks if not task.name.startswith("val/")] == list(without.tasks)


def test_the_summary_and_the_drawings_say_so(project, graph_of):
    lines = summarize(check_file(project.folder / "p.yaml", [OLD])).splitlines()
    (line,) = [line for line in lines if line.startswith("  old ")]
    assert line.endswith(f"prompt_tokens, response_tokens -> old_logprob  (skipped: {REASON})")
    graph = graph_of(OLD)
    assert f"  old  (logprob on actor, skipped)\n    skipped: {REASON}\n" in draw_text(graph)
    assert "logprob on actor, skipped" in draw_mermaid(graph)
    assert "logprob on actor, skipped" in draw_svg(graph)
    assert "skipped" not in draw_text(graph_of(OLD, "nodes.update.epochs=2"))


TOLD = [
    "nodes.told={op: tell, demonstration: answer, max_prompt_tokens: 16}",
    "nodes.teacher={op: logprob, engine: actor, read: {prompt_tokens: teacher_prompt_tokens}, write: teacher_logprob}",
    "nodes.update.loss={distillation: {}}",
]


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([OLD], "take those of the rollout"),
        (TOLD, "an engine or frozen copy that does not move"),
        (["nodes.ref={op: logprob, engine: actor, write: ref_logprob}"], "an engine or frozen copy that does not move"),
        (
            [*TOLD, "nodes.teacher={op: logprob, engine: actor, write: teacher_logprob, top_k: 4}"],
            "an engine or frozen copy that does not move",
        ),
    ],
)
def test_a_stream_of_mini_batches_names_the_remedy(project, graph_of, overrides, remedy):
    overrides = [*overrides, "nodes.update.mini_batch=4", "schedule={stream_update: true, shards_per_step: 4}"]
    loaded = load_pipeline(project.pipeline(), overrides)
    node, graph = loaded.pipeline.nodes["update"], build_graph(loaded.pipeline, loaded.folder)
    message = hindrance(loaded.pipeline, "update", node, graph)
    assert remedy in message
    assert ("drop `stream_update`" in message) == (remedy[:2] == "an")
