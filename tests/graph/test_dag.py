import os
import subprocess
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from project import assert_code

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import CustomNode, Pipeline
from dagrl.graph.dag import Wire
from dagrl.graph.inference import build_graph
from dagrl.plugins.declarations import node
from dagrl.validation import check_file


def graph_of(path, *overrides):
    loaded = load_pipeline(path, overrides)
    return build_graph(loaded.pipeline, loaded.folder, loaded.positions)


class TestInference:
    def test_order_is_that_of_the_file_among_ready_nodes(self, project):
        graph = graph_of(project.folder / "p.yaml")
        assert graph.order == ("prompts", "rollout", "reward", "ref", "advantage", "update", "samples")

    def test_edges_follow_from_columns(self, project):
        graph = graph_of(project.folder / "p.yaml")
        assert graph.nodes["update"].inputs["ref_logprob"] == Wire("ref", "ref_logprob")
        assert graph.nodes["ref"].outputs == {"logprob": "ref_logprob"}
        assert graph.producers("advantage") == ("prompts", "rollout", "reward")
        assert graph.consumers("reward") == ("advantage", "samples")
        assert graph.ancestors("reward") == {"prompts", "rollout"}
        assert graph.edges["rollout", "update"] == (
            *("response_tokens", "response_mask", "policy_version"),
            "rollout_logprob",
        )
        assert len(graph.edges) == 16

    def test_optional_columns_are_read_only_where_written(self, project):
        path = project.folder / "p.yaml"
        assert "old_logprob" not in graph_of(path).nodes["update"].inputs
        graph = graph_of(path, "nodes.old={op: logprob, engine: actor, write: old_logprob}")
        assert graph.nodes["update"].inputs["old_logprob"] == Wire("old", "old_logprob")

    def test_read_takes_another_column_or_that_of_a_named_node(self, project):
        path = project.pipeline(
            ("  ref:", "  judge: {op: reward, fn: math}\n  ref:"),
            ("estimator: grpo}", "estimator: grpo, read: {reward: judge.reward}}"),
            ("fn: exact}", "fn: exact, write: exactness}"),
        )
        graph = graph_of(path)
        assert graph.nodes["advantage"].inputs["reward"] == Wire("judge", "reward")
        assert graph_of(path, "nodes.advantage.read.reward=exactness").nodes["advantage"].inputs["reward"] == Wire(
            "reward", "exactness"
        )

    def test_two_writers_are_fine_where_every_reader_selects_one(self, project):
        path = project.pipeline(
            ("write: ref_logprob}", "}\n  old: {op: logprob, engine: actor}"),
            ("op: update,", "op: update, read: {ref_logprob: ref.logprob, old_logprob: old.logprob},"),
        )
        inputs = graph_of(path).nodes["update"].inputs
        assert inputs["ref_logprob"] == Wire("ref", "logprob")
        assert inputs["old_logprob"] == Wire("old", "logprob")

    def test_one_of_two_writers_of_a_single_column_is_named_by_its_node(self, project):
        again = "{op: logprob, engine: actor, write: old_logprob}"
        path = project.pipeline(
            ("  update: {op: update,", f"  a: {again}\n  b: {again}\n  update: {{op: update, read_from: [b],")
        )
        assert graph_of(path).nodes["update"].inputs["old_logprob"] == Wire("b", "old_logprob")

    def test_validation_stops_at_the_reward(self, project):
        validation = graph_of(project.folder / "p.yaml").validation
        assert validation.order == ("prompts", "rollout", "reward", "samples")
        assert set(validation.nodes["samples"].inputs) == {
            "group_id",
            "prompt_tokens",
            "response_tokens",
            "reward",
            "data_set",
            "answer",
            "data_source",
            "policy_version",
            "finish_reason",
        }

    def test_order_does_not_depend_on_the_hash_seed(self, project):
        code = (
            "import sys\nfrom dagrl.config.loading.loader import load_pipeline\n"
            "from dagrl.graph.inference import build_graph\n"
            "graph = build_graph(load_pipeline(sys.argv[1]).pipeline); print(graph.order, list(graph.edges))"
        )
        told = {
            subprocess.run(
                [sys.executable, "-c", code, str(project.folder / "p.yaml")],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(told) == 1

    def test_unread_columns_are_a_warning(self, project):
        path = project.pipeline(("kl_coef: 0.01", "kl_coef: 0"), (", write: ref_logprob", ""))
        (warning,) = check_file(path).warnings
        assert str(warning) == (
            f"{path}:22: nodes.ref: no node reads its columns (`logprob`); "
            "set `write: old_logprob` or `write: ref_logprob`"
        )

    @pytest.mark.parametrize(
        "node",
        [
            "{op: reward, fn: exact, write: watched}",
            "{op: reward, fn: 'own_rewards:shorter', write: watched}",
            "{op: judge, endpoint: 'http://judge:8000/v1', model: m, prompt: '{response}', write: watched}",
        ],
    )
    def test_a_reward_that_metrics_alone_read_is_fine(self, project, node):
        project.write("own_rewards.py", "def shorter(response, answer): ...\n")
        assert check_file(project.folder / "p.yaml", [f"nodes.watch={node}"]).warnings == ()

    def test_a_baseline_that_nothing_is_compared_with_is_none(self, project):
        node = "nodes.baseline={op: reward, fn: exact, write: baseline_reward}"
        (warning,) = check_file(project.folder / "p.yaml", [node]).warnings
        assert (warning.code, "baseline_reward" in warning.message) == ("unread-node", True)


REF = "{op: logprob, engine: reference, write: ref_logprob}"
ADVANTAGE = "{op: advantage, estimator: grpo}"
REWARD = "{op: reward, fn: exact}"
CASES = {
    "nobody writes": (
        REF,
        "null",
        "nodes.update",
        "missing-column",
    ),
    "misspelt name": (
        REF,
        REF.replace("ref_log", "reff_log"),
        "nodes.update",
        "missing-column",
    ),
    "sink": (REWARD, "null", "nodes.advantage", "missing-column"),
    "renamed to nothing": (
        ADVANTAGE,
        "{op: advantage, estimator: grpo, read: {reward: rewrad}} #!",
        "nodes.advantage.read.reward",
        "missing-column",
    ),
    "two writers": (
        REWARD,
        REWARD + "\n  judge: {op: reward, fn: math} #!",
        "nodes.judge",
        "ambiguous-column",
    ),
    "two unread logprobs": (
        REF,
        REF + "\n  a: {op: logprob, engine: actor}\n  b: {op: logprob, engine: actor} #!",
        "nodes.b",
        "ambiguous-column",
    ),
    "writes a column of the data": (
        REF,
        REF + "\n  a: {op: logprob, engine: actor, write: answer} #!",
        "nodes.a.write",
        "wrong-column-kind",
    ),
    "no such column to read": (
        ADVANTAGE,
        "{op: advantage, estimator: grpo, read: {rewrd: reward}} #!",
        "nodes.advantage.read.rewrd",
        "unknown-column",
    ),
    "no such node": (
        ADVANTAGE,
        "{op: advantage, estimator: grpo, read: {reward: rewad.reward}} #!",
        "nodes.advantage.read.reward",
        "unknown-node",
    ),
    "no such column of the node": (
        ADVANTAGE,
        "{op: advantage, estimator: grpo, read: {reward: reward.score}} #!",
        "nodes.advantage.read.reward",
        "unknown-column",
    ),
    "wrong kind": (
        ADVANTAGE,
        "{op: advantage, estimator: grpo, read: {reward: ref_logprob}} #!",
        "nodes.advantage.read.reward",
        "wrong-column-kind",
    ),
    "no such column to write": (
        REF,
        "{op: logprob, engine: reference, write: {logprb: ref_logprob}, read: {}} #!",
        "nodes.ref.write.logprb",
        "unknown-column",
    ),
    "one name for several": (
        "n: 4, sampling: {max_new_tokens: 8}}",
        "n: 4, write: responses, sampling: {max_new_tokens: 8}} #!",
        "nodes.rollout.write",
        "wrong-number-of-columns",
    ),
    "two into one": (
        "n: 4, sampling: {max_new_tokens: 8}}",
        "n: 4, write: {rollout_logprob: response_mask}, sampling: {max_new_tokens: 8}} #!",
        "nodes.rollout.write",
        "duplicate-column",
    ),
    "name for none": (
        "kl_coef: 0.01}}",
        "kl_coef: 0.01}, write: x} #!",
        "nodes.update.write",
        "wrong-number-of-columns",
    ),
    "no column's name": (
        REF,
        "{op: logprob, engine: reference, write: ref.logprob} #!",
        "nodes.ref.write",
        "invalid-column-name",
    ),
    "cycle": (
        REWARD,
        "{op: reward, fn: exact, read: {extra_info: hint}} #!\n  loop: {op: 'loops:loop'}",
        "nodes.reward",
        "cycle",
    ),
    "reads its own": (
        REF,
        REF + "\n  own: {op: 'loops:own'} #!",
        "nodes.own",
        "reads-itself",
    ),
    "reserved name": (
        REF,
        REF + "\n  samples: {op: reward, fn: math} #!",
        "nodes.samples",
        "reserved-name",
    ),
    "second rollout": (
        REF,
        REF + "\n  again: {op: rollout, engine: generator, n: 2, sampling: {max_new_tokens: 8}} #!",
        "nodes.again",
        "ambiguous-column",
    ),
    "no rollout": (
        "{op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}",
        "null",
        "nodes",
        "missing-rollout",
    ),
    "custom op not there": (REF, REF + "\n  x: {op: 'loops:lop'} #!", "nodes.x.op", "invalid-op"),
    "custom op undecorated": (REF, REF + "\n  x: {op: 'loops:bare'} #!", "nodes.x.op", "invalid-op"),
}
LOOPS = """\
import dagrl
@dagrl.node(reads=["reward"], writes=["hint"])
def loop(batch): ...
@dagrl.node(reads=["score"], writes=["score"])
def own(batch): ...
def bare(batch): ...
"""


@pytest.mark.parametrize(("old", "new", "place", "code"), CASES.values(), ids=CASES.keys())
def test_errors_of_columns_are_reported_once(project, monkeypatch, old, new, place, code):
    monkeypatch.delitem(sys.modules, "loops", raising=False)
    project.write("loops.py", LOOPS)
    path = project.pipeline((old, new))
    with pytest.raises(PipelineError) as caught:
        graph_of(path)
    (problem,) = caught.value.problems
    assert problem.place == place
    assert_code(problem, code)
    marked = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if "#!" in line]
    if marked:
        assert problem.line == marked[0]


def test_all_problems_are_reported_at_once(project):
    path = project.pipeline(
        (REF, "null"),
        (REWARD, "{op: reward, fn: exact, read: {anser: answer}}"),
        (ADVANTAGE, "{op: advantage, estimator: grpo, kl_in_reward: {coef: 0.1}}"),
    )
    with pytest.raises(PipelineError) as caught:
        graph_of(path)
    assert [(problem.place, problem.message.partition(" is read by")[0]) for problem in caught.value.problems] == [
        ("nodes.reward.read.anser", "the op reads no column `anser`; did you mean `answer`?"),
        ("nodes.advantage", "column `old_logprob`"),
        ("nodes.advantage", "column `ref_logprob`"),
    ]


def _pipeline(base_pipeline: Pipeline, names: list[str]) -> Pipeline:
    extra = {name: CustomNode(op=f"generated_ops:{name}") for name in names}
    return base_pipeline.model_copy(update={"nodes": {**base_pipeline.nodes, **extra}})


@settings(max_examples=60, deadline=None)
@given(
    parents=st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=8),
    data=st.data(),
)
def test_order_is_topological_and_edges_do_not_depend_on_declaration_order(tmp_path_factory, parents, data):
    """Random DAGs: node i reads a column of each of some nodes before it."""
    reads = {
        f"n{index}": sorted({f"n{other}" for other in earlier if other < index})
        for index, earlier in enumerate(parents)
    }
    module = types.ModuleType("generated_ops")
    for name, sources in reads.items():
        columns = [f"{source}_out" for source in sources] or ["reward"]
        setattr(module, name, node(reads=columns, writes=[f"{name}_out"])(lambda batch: {}))
    sys.modules["generated_ops"] = module
    base_pipeline = _base_pipeline(tmp_path_factory)

    graph = build_graph(_pipeline(base_pipeline, list(reads)))
    shuffled = build_graph(_pipeline(base_pipeline, data.draw(st.permutations(list(reads)))))

    assert {edge for edge in graph.edges if edge[1] in reads} == {
        (source, name) for name, sources in reads.items() for source in sources or ["reward"]
    }
    assert dict(shuffled.edges) == dict(graph.edges)
    for each in (graph, shuffled):
        place = {name: index for index, name in enumerate(each.order)}
        assert all(place[producer] < place[consumer] for producer, consumer in each.edges)
        assert (each.order[0], each.order[-1]) == ("prompts", "samples")


_cached: list[Pipeline] = []


def _base_pipeline(tmp_path_factory) -> Pipeline:
    if not _cached:
        path = tmp_path_factory.mktemp("graph") / "p.yaml"
        path.write_text(
            "name: g\nmodel: {init: {model_type: qwen3}}\n"
            "data: {train: t, prompts_per_step: 1, max_prompt_tokens: 1}\ngroups: {g: {cpus_per_node: 1}}\n"
            "engines: {e: {backend: hf, group: g}}\nrun: {steps: 1}\n"
            "nodes:\n  rollout: {op: rollout, engine: e, sampling: {max_new_tokens: 1}}\n"
            "  reward: {op: reward, fn: exact}\n"
        )
        _cached.append(load_pipeline(path).pipeline)
    return _cached[0]
