"""Several files laid over each other: whose word counts, and whose line is told."""

import itertools

import pytest
from project import assert_code

from dagrl.config.errors import PipelineError
from dagrl.config.loading.extends import read_with_parents
from dagrl.config.loading.loader import load_pipeline
from dagrl.validation import check_file


@pytest.fixture
def merged(tmp_path):
    """Name -> text of files, the last of which is read -> what comes out of it."""

    def read(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return read_with_parents(tmp_path / f"{list(files)[-1]}.yaml")

    return read


def test_later_files_are_laid_over_earlier_ones_and_the_file_itself_over_all(merged):
    document = merged(
        one="a: 1\nb: 1\nc: {x: 1, y: 1, z: 1}\n",
        two="b: 2\nc: {y: 2, z: 2}\nd: 2\n",
        three="extends: [one, two]\nc: {z: 3}\nd: null\n",
    )
    assert document.tree == {"a": 1, "b": 2, "c": {"x": 1, "y": 2, "z": 3}, "d": None}


def test_every_key_knows_the_file_and_line_it_comes_from(merged, tmp_path):
    document = merged(
        one="a: 1\nc:\n  x: 1\n  y: 1\n",
        two="c:\n  y: 2\n  list: [1,\n    2]\n",
        three="extends:\n- one\n- two\nz: 3\n",
    )
    places = [(), ("a",), ("c", "x"), ("c", "y"), ("c", "list", 1), ("z",)]
    known = [(document.positions[place].file, document.positions[place].line) for place in places]
    told = [("three", 1), ("one", 1), ("one", 3), ("two", 2), ("two", 4), ("three", 4)]
    assert known == [(str(tmp_path / f"{name}.yaml"), line) for name, line in told]


def test_a_node_with_another_function_inherits_no_args(merged, tmp_path):
    base = "nodes: {reward: {fn: math, args: {strict: true}}}\n"
    for function, args in (("exact", None), ("math", {"strict": True}), ("null", None)):
        tree = merged(base=base, child=f"extends: base\nnodes: {{reward: {{fn: {function}}}}}\n").tree
        assert tree["nodes"]["reward"].get("args") == args
    tree = merged(base=base, child="extends: base\nnodes: {reward: {fn: exact, args: {ignore_case: true}}}\n").tree
    assert tree["nodes"]["reward"]["args"] == {"ignore_case": True}
    base = "nodes: {reward: {by_source: {code: {fn: code, args: {max_tests: 2}}, sums: {fn: exact, args: {a: 1}}}}}\n"
    child = "extends: base\nnodes: {reward: {by_source: {code: {fn: 'mine:code'}, sums: {fn: exact}}}}\n"
    own = merged(base=base, child=child).tree["nodes"]["reward"]["by_source"]
    assert own == {"code": {"fn": "mine:code"}, "sums": {"fn": "exact", "args": {"a": 1}}}


@pytest.mark.parametrize("order", list(itertools.permutations(["base", "left", "right"])))
def test_a_common_parent_is_applied_before_both(merged, order):
    document = merged(
        base="name: base\nleft: base\nright: base\nboth: base\n",
        left="extends: base\nleft: left\nboth: left\n",
        right="extends: base\nright: right\nboth: right\n",
        child=f"extends: [{', '.join(order)}]\n",
    )
    last = max(("left", "right"), key=order.index)
    assert document.tree == {"name": "base", "left": "left", "right": "right", "both": last}


def test_a_null_takes_away_what_an_earlier_file_says_and_a_later_one_brings_it_back(merged):
    files = {"one": "a: {x: 1, y: 1}\n", "two": "a: null\n", "three": "a: {x: 3}\n"}
    assert merged(**files, child="extends: [one, two]\n").tree == {"a": None}
    assert merged(**files, child="extends: [one, two, three]\n").tree == {"a": {"x": 3}}


def test_each_problem_names_the_file_that_it_is_in(project):
    one = project.write("one.yaml", "data:\n  max_prompt_tokens: many\n")
    two = project.write("two.yaml", "nodes:\n  rollout:\n    n: few\n")
    child = project.write("child.yaml", "extends: [p, one, two]\nrun: {steps: soon}\n")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(child)
    told = [(problem.file, problem.line, problem.place) for problem in caught.value.problems]
    assert told == [
        (str(child), 2, "run.steps"),
        (str(one), 2, "data.max_prompt_tokens"),
        (str(two), 3, "nodes.rollout.n"),
    ]


@pytest.mark.parametrize(
    ("entry", "place", "message"),
    [
        ("gone", "extends[1]", "unknown-template"),
        ("./gone.yaml", "extends[1]", "unknown-template"),
        ("7", "extends[1]", "unknown-template"),
        ("null", "extends[1]", "unknown-template"),
        ("a" * 5000, "extends[1]", "'aaaaaaaaaaaaaaa"),
        ("off", "extends[1]", "unreadable-value"),
        ("./child.yaml", "extends[1]", "unknown-template"),
        ("other", "extends", "unknown-template"),
    ],
)
def test_an_impossible_entry_is_the_only_problem_with_its_line(project, entry, place, message):
    project.write("other.yaml", "extends: child\n")
    child = project.write("child.yaml", f"extends:\n- p\n- {entry}\n")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(child)
    (problem,) = caught.value.problems
    line = (str(child), 3) if entry != "other" else (str(project.folder / "other.yaml"), 1)
    assert (problem.file, problem.line, problem.place) == (*line, place)
    assert_code(problem, message)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "unknown-template"),
        ("off", "unreadable-value"),
        (r'"\ud800"', "unreadable-value"),
    ],
)
def test_keys_that_a_missing_parent_may_have_set_are_not_reported(project, said, message):
    child = project.write("child.yaml", f"name: x\nextends: {said}\n")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(child)
    (problem,) = caught.value.problems
    assert (problem.line, problem.place) == (2, "extends")
    assert_code(problem, message)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("run.steps=3", "unreadable-file"),
        ("tiny_grpo", "unreadable-file"),
        ("a" * 5000, "unreadable-file"),
        ("gone.yaml", "unreadable-file"),
    ],
)
def test_a_path_to_nowhere_says_what_may_have_been_meant(path, remedy):
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.place) == (path, 1, "file")
    assert_code(problem, remedy)


class TestNulls:
    def test_take_away_what_any_kind_of_engine_or_node_has(self, project):
        child = project.write(
            "child.yaml", "extends: p\nengines: {generator: {server: null}}\nnodes: {reward: {engine: null, n: null}}\n"
        )
        loaded = load_pipeline(child).pipeline
        assert loaded == load_pipeline(project.folder / "p.yaml").pipeline

    @pytest.mark.parametrize(
        ("said", "place", "message"),
        [
            ("foo:", "foo", "unknown-key"),
            ("nodes: {rollout: {samplng: null}}", "nodes.rollout.samplng", "unknown-key"),
            ("nodes: {update: {loss: {kl_coeff: null}}}", "nodes.update.loss.kl_coeff", "unknown-key"),
            ("engines: {actor: {parallel: {tp: null}}}", "engines.actor.parallel.tp", "unknown-key"),
        ],
    )
    def test_alternatives_to_a_misspelt_key_are_listed(self, project, said, place, message):
        child = project.write("child.yaml", f"extends: p\n{said}\n")
        with pytest.raises(PipelineError) as caught:
            load_pipeline(child)
        (problem,) = caught.value.problems
        assert (problem.line, problem.place) == (2, place)
        assert_code(problem, message)


def test_a_misspelt_node_gets_the_nearest_name(project):
    child = project.write("child.yaml", "extends: p\nnodes: {rolout: {n: 3}}\nengines: {judge: {group: train}}\n")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(child)
    assert [(problem.place, problem.message) for problem in caught.value.problems] == [
        ("nodes.rolout.op", "the key is missing; add `op:`, or rename `rolout` to `rollout`"),
        ("engines.judge.backend", "the key is missing; add `backend:`, or remove `judge`"),
    ]


def test_null_removes_a_value_of_a_template(project):
    inherited = project.pipeline(("estimator: grpo}", "estimator: grpo, baseline: mean} #!"))
    child = project.write("child.yaml", f"extends: {inherited}\n")
    (problem,) = project.problems(child)
    assert problem.file == str(inherited)
    assert problem.message.endswith("; remove it, or write `baseline: null` in child.yaml")
    child.write_text(f"extends: {inherited}\nnodes: {{advantage: {{baseline: null}}}}\n")
    check_file(child)  # nothing is left to be told
    (problem,) = project.problems(inherited)
    assert problem.message.endswith("; remove it")


def test_a_message_that_names_the_key_to_remove_says_how_to_reset_it(project):
    inherited = project.pipeline(("backend: hf,", "backend: hf, model: {path: m},"))
    child = project.write("child.yaml", f"extends: {inherited}\n")
    (problem,) = [each for each in project.problems(child) if each.code == "model-of-another"]
    assert problem.message.endswith("; remove `model`, or write `model: null` in child.yaml")


def test_keys_of_a_templates_other_backend_are_taken_away_with_null(project):
    inherited = project.pipeline(("backend: hf,", "backend: hf, max_batch_size: 8,"))
    child = project.write("child.yaml", f"extends: {inherited}\nengines: {{generator: {{backend: sglang}}}}\n")
    (problem,) = project.problems(child)
    message = (
        f"`backend: sglang` does not take `max_batch_size`, which {inherited.name} sets; choose another, or write "
        "`max_batch_size: null` beside it"
    )
    where = (problem.file, problem.place, problem.message)
    assert where == (str(child), "engines.generator.backend", message)


@pytest.mark.parametrize(
    ("text", "overrides", "places"),
    [
        ("engines: {actor: {backend: vllm}}", (), ["engines.actor.backend"]),
        (
            "engines: {actor: {backend: hf, lr_schedule: {}}}",
            (),
            ["engines.actor.backend", "engines.actor.lr_schedule"],
        ),
        ("nodes: {reward: {op: advantage, estimator: grpo}}", (), ["nodes.reward.op"]),
        ("", ["engines.actor.backend=vllm"], ["override engines.actor.backend=vllm"]),
        ("engines: {actor: {backend: megatron}}", ["engines.actor.backend=hf"], ["override engines.actor.backend=hf"]),
        ("engines: {actor: {server: {}}}", (), ["engines.actor.server"]),
        ("", ["engines.actor.server={}"], ["override engines.actor.server={}"]),
    ],
)
def test_the_choice_of_another_kind_is_named_not_the_lines_of_the_template(project, text, overrides, places):
    child = project.write("child.yaml", f"extends: tiny_grpo\n{text}\n")
    with pytest.raises(PipelineError) as caught:
        load_pipeline(child, overrides)
    assert [problem.place for problem in caught.value.problems] == places
