import sys

import pytest

from dagrl.config.schema import Scope
from dagrl.plugins.custom import importable_from, load_function, raised_by
from dagrl.plugins.declarations import declared, node, reward, reward_traits


def test_a_decorated_function_says_its_columns(project):
    project.write(
        "my_ops.py", "import dagrl\n@dagrl.node(reads=['reward'], writes=['bonus'], scope='group')\ndef f(batch): ...\n"
    )
    contract = declared(load_function("my_ops:f", project.folder), "my_ops:f", "node")
    assert (contract.reads, contract.writes, contract.scope) == (("reward",), ("bonus",), Scope.GROUP)


def test_an_undecorated_function_is_refused():
    with pytest.raises(ValueError, match=r"`m:f` does not declare its columns; decorate it"):
        declared(print, "m:f", "node")


def test_a_long_complaint_is_shortened():
    def wordy():
        raise ValueError("x" * 10_000)

    with pytest.raises(ValueError, match="xxx") as caught:
        wordy()
    told = raised_by(wordy, caught.value)
    assert told.startswith("raised ValueError: xxx")
    assert f"xxx ... ({__file__}:" in told
    assert len(told) < 800


def test_reward_traits_default_to_one_call_a_sample():
    assert not reward_traits(print).batched
    assert reward_traits(reward(batched=True)(lambda: 0)).batched


def test_decorator_refuses_an_unknown_scope_and_columns_given_as_text():
    with pytest.raises(ValueError, match="cannot be 'rows'; did you mean `row`"):
        node(reads=[], writes=[], scope="rows")
    with pytest.raises(ValueError, match="are a list of names, not 'reward'"):
        node(reads="reward", writes=[])


@pytest.mark.parametrize(
    ("decorator", "message"),
    [
        (
            "dagrl.node(reads=['reward'], writes={'bonus': 'float12'})",
            "the columns that the node writes are a list of names",
        ),
        ("dagrl.node(reads=['reward'], writes=['bonus:float12'])", "'bonus:float12' is not the name of a column"),
        ("dagrl.node(reads=['reward'], writes=[('bonus', 'int7')])", "('bonus', 'int7') is not the name of a column"),
        ("dagrl.node(reads=[3], writes=['bonus'])", "3 is not the name of a column that the node reads"),
        ("dagrl.node(reads=['reward'], writes=['Bonus'])", "'Bonus' is not the name of a column"),
        ("dagrl.node(reads=['reward'], writes=['bonus', 'bonus'])", "the node writes `bonus` twice; write each column"),
        ("dagrl.node(reads=None, writes=['bonus'])", "the columns that the node reads are a list of names, not None"),
        ("dagrl.node(reads=['reward'], writes=['bonus'], scope=['row'])", "the scope cannot be ['row']; "),
        ("dagrl.estimator(reads={'reward': 'float12'})", "the columns that the estimator reads are a list of names"),
        (
            "dagrl.loss(reads=['old_logprob:float12'])",
            "'old_logprob:float12' is not the name of a column",
        ),
        ("dagrl.reward(concurrency='many')", "it cannot be 'many'"),
        ("dagrl.reward(batched='yes')", "a reward's `batched` is True or False; it cannot be 'yes'"),
    ],
)
def test_a_wrong_declaration_is_reported_with_the_users_line(project, monkeypatch, decorator, message):
    project.write("declares.py", f"import dagrl\n\n@{decorator}\ndef f(batch): ...\n")
    monkeypatch.delitem(sys.modules, "declares", raising=False)
    with pytest.raises(ValueError) as caught:
        load_function("declares:f", project.folder)
    told = str(caught.value)
    assert told.startswith(f"importing 'declares' fails at {project.folder / 'declares.py'}:3: ValueError: ")
    assert message in told
    assert told.endswith("; fix the module")


@pytest.mark.parametrize(
    ("place", "source", "message"),
    [
        ("absent_one:f", None, r"there is no module 'absent_one'; put absent_one.py beside the pipeline file"),
        ("no_colon", None, "is not `module:function`"),
        ("typo_fn:skore", "def score(): ...", r"has no function 'skore'; did you mean `score`\?"),
        ("bad_syntax:f", "x = 1\ndef f(:", r"fails at .*bad_syntax.py:2: SyntaxError: .*; fix the module"),
        ("bad_name:f", "x = 1\n\ny = undefined", r"fails at .*bad_name.py:3: NameError: name 'undefined'"),
        (
            "bad_import:f",
            "import absent_two",
            r"fails at .*bad_import.py:1: ModuleNotFoundError: No module named 'absent",
        ),
        ("exits:f", "raise SystemExit('usage: x')", r"fails at .*exits.py:1: SystemExit: usage: x; fix the module"),
    ],
)
def test_errors_of_a_module_are_one_sentence(project, place, source, message):
    if source is not None:
        project.write(f"{place.partition(':')[0]}.py", source)
    with pytest.raises(ValueError, match=message) as caught:
        load_function(place, project.folder)
    assert "\n" not in str(caught.value)


def test_the_folder_leaves_the_import_path_afterwards(project):
    before = list(sys.path)
    with importable_from(project.folder):
        assert sys.path[0] == str(project.folder.resolve())
    assert sys.path == before


def test_modules_of_dagrls_templates_are_found_from_anywhere_but_those_beside_the_file_come_first(project, monkeypatch):
    def calls():
        monkeypatch.delitem(sys.modules, "calculating", raising=False)
        found = load_function("calculating:calls", project.folder)("1+2")
        del sys.modules["calculating"]
        return found

    assert calls() == [("calculator", {"expression": "1+2"})]
    project.write("calculating.py", "def calls(text): return 'mine'")
    assert calls() == "mine"
