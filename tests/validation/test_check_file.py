import subprocess
import sys
from copy import deepcopy
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagrl.config.errors import PipelineError
from dagrl.config.loading.yaml_source import dump_document, read_document
from dagrl.validation import check_file


def test_a_right_pipeline_comes_with_its_graph_and_rows(project):
    checked = check_file(project.folder / "p.yaml")
    assert checked.rows == {"train": 32}
    assert checked.warnings == ()
    assert checked.graph.order[0] == "prompts"


def test_mistakes_of_form_are_reported_together(project):
    path = project.pipeline(
        ("name: tiny", "name: tiny\nname: again"),
        ("alphabet: ", "alfabet: "),
        ("backend: megatron\n", "backend: megatro\n"),
        ("run: {steps: 10}", "run: {steps: ten}"),
    )
    assert [(problem.line, problem.place) for problem in project.problems(path, "track=[consol]")] == [
        (2, "name"),
        (5, "model.tokenizer.alfabet"),
        (15, "engines.actor.backend"),
        (26, "run.steps"),
        (1, "override track=[consol]"),
    ]


def test_mistakes_between_sections_are_reported_together(project):
    project.write("ops.py", "def oops(:\n")
    path = project.pipeline(
        ("hidden_size: 64", "hidden_size: wide"),
        ("train.parquet", "gone.parquet"),
        ("group: train\n", "group: trian\n"),
        ("{lr: 1e-3}", "{}"),
        ("fn: exact", "fn: 'ops:oops'"),
        ("write: ref_logprob", "write: reff_logprob"),
        ("n: 4,", "n: 1,"),
        ("kl_coef: 0.01}", "kl_coef: 0.01}, tokens_per_micro_batch: 20"),
        ("run: {steps: 10}", "run: {steps: 10, validate_every: 2}"),
    )
    assert [(problem.line, problem.place) for problem in project.problems(path)] == [
        (3, "model.init.hidden_size"),
        (6, "data.train"),
        (15, "engines.actor.group"),
        (16, "engines.actor.optimizer"),
        (20, "nodes.rollout.n"),
        (21, "nodes.reward.fn"),
        (24, "nodes.update"),
        (24, "nodes.update.tokens_per_micro_batch"),
        (25, "run.validate_every"),
    ]


def test_checking_needs_neither_torch_nor_ray_nor_transformers(project):
    code = (
        "import sys; from dagrl.cli import main\n"
        "code = main(['validate', sys.argv[1], 'engines.actor.transformer.recompute_granularity=selective'])\n"
        "heavy = {'torch', 'ray', 'transformers', 'megatron', 'pandas', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'exit code {code}, imported {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(project.folder / "p.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_SCALARS = [None, 0, -1, 2, 10**20, 1.5, float("nan"), True, "", "x", "~", "\0", "a:b", "a.b", "a" * 5000]
_NAMES = ["actor", "reference", "generator", "train", "reward.reward", "samples"]
_VALUES = st.sampled_from([*_SCALARS, *_NAMES, [], {}, ["x"], [[1]], {"op": "rollout"}, {"backend": "hf"}])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_file_gives_a_pipeline_or_problems_with_a_remedy(project, data):
    tree = read_document(Path(project.folder / "p.yaml")).tree
    for _ in range(data.draw(st.integers(1, 3))):
        section = tree
        while True:
            key = data.draw(st.sampled_from(sorted(section)))
            if not (isinstance(section[key], dict) and section[key] and data.draw(st.booleans())):
                break
            section = section[key]
        # A copy, as the next round may write into it.
        section[data.draw(st.sampled_from([key, f"{key}s", "read", "frozen_copy_of", "1"]))] = deepcopy(
            data.draw(_VALUES)
        )
    path = project.write("changed.yaml", dump_document(tree))
    try:
        check_file(path)
    except PipelineError as error:
        lines = len(path.read_text().splitlines())
        for problem in error.problems:
            assert problem.file == str(path)
            assert 1 <= problem.line <= lines
            assert "; " in problem.message
            assert "\n" not in str(problem)
