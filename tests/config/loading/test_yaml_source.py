import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from project import assert_code

from dagrl.config.errors import PipelineError
from dagrl.config.loading.yaml_source import dump_document, parse_value, read_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3E5", 3e5),
        ("1.0e-6", 1e-6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("-7", -7),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ("true", True),
        ("False", False),
        ("'no'", "no"),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("1e", "1e"),
        ("e5", "e5"),
        ("-", "-"),
        ("[1, 2e3]", [1, 2000.0]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars_are_what_people_expect(text, value):
    parsed = parse_value(text) if text != "-" else parse_value("'-'")
    assert parsed == value
    assert type(parsed) is type(value)


def test_infinity_and_nan_are_numbers():
    assert parse_value("-.inf") == -math.inf
    assert math.isnan(parse_value(".nan"))


@pytest.mark.parametrize("word", ["yes", "No", "on", "OFF"])
def test_words_that_mean_different_things_in_yaml_1_1_and_1_2_are_refused(word):
    with pytest.raises(ValueError, match=f"a bare `{word}` is ambiguous; write `(true|false)`"):
        parse_value(word)


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="ascii"))
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), inner),
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), _TREES, min_size=1))
@example({"a": ["nO", "No", "oN", "yes", "OFF"]})
def test_a_dump_reads_back_the_same(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    path.write_text(dump_document(tree), encoding="utf-8")
    document = read_document(path)
    assert document.problems == []
    assert document.tree == tree


@pytest.mark.parametrize("text", ["1e-6", "3E5", "no", "010", "1_000", "2024-01-02", "~", "", "0x1F", "1:30"])
def test_text_that_looks_like_something_else_stays_text(text):
    assert parse_value(dump_document({"key": text}).removeprefix("key: ").strip()) == text


def test_every_key_and_item_has_its_line(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n")
    lines = {place: position.line for place, position in read_document(path).positions.items()}
    assert lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", 0): 4,
        ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5,
    }


def test_anchors_and_merge_keys_work(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n")
    document = read_document(path)
    assert document.problems == []
    assert document.tree == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("content", "line", "place", "fragment"),
    [
        (b"", 1, "file", "unreadable-file"),
        (b"# only a comment\n", 1, "file", "unreadable-file"),
        (b"- a\n- b\n", 1, "file", "unreadable-file"),
        (b"just words\n", 1, "file", "unreadable-file"),
        (b"name: x\nrun:\n\tsteps: 1\n", 3, "column 1", "yaml-syntax"),
        (b"name: x\nrun: [1, 2\ndata: y\n", 3, "column 5", "yaml-syntax"),
        (b"name: x: y\n", 1, "column 8", "yaml-syntax"),
        (b"name: x\n---\nname: y\n", 2, "column 1", "yaml-syntax"),
        (b"name: 'x\n", 2, "column 1", "yaml-syntax"),
        (b"name: \xff\n", 1, "file", "unreadable-file"),
        (b"name: \x07\n", 1, "file", "yaml-syntax"),
        (b"name: x\n# y\nrun: \x00\n", 3, "file", "yaml-syntax"),
        (b"a: *nobody\n", 1, "column 4", "yaml-syntax"),
        (b"a: " + b"[" * 2000, 1, "file", "too-large"),
        (b"a: &a\n  b: *a\n", 1, "file", "an alias (`*name`) contains itself"),
    ],
)
def test_a_file_that_holds_no_mapping_is_one_problem(tmp_path, content, line, place, fragment):
    path = tmp_path / "p.yaml"
    path.write_bytes(content)
    with pytest.raises(PipelineError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.place) == (str(path), line, place)
    assert_code(problem, fragment)


def test_missing_file_and_folder_have_different_messages(tmp_path):
    with pytest.raises(PipelineError, match=r"no\.yaml:1: file: does not exist; check the path"):
        read_document(tmp_path / "no.yaml")
    with pytest.raises(PipelineError, match="is a folder; give the pipeline's YAML file"):
        read_document(tmp_path)


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read_document(path).tree == {"name": "x"}


@pytest.mark.parametrize(
    ("content", "line", "place", "fragment"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "a", "duplicate-key"),
        ("x:\n  a: 1\n  a: 1\n", 3, "x.a", "duplicate-key"),
        ("x: [{a: 1, a: 2}]\n", 1, "x[0].a", "duplicate-key"),
        ("a: 1\nb: !!python/name:os.system x\n", 2, "b", "unreadable-value"),
        ("a: 1\nb: !!binary aGk=\n", 2, "b", "unreadable-value"),
        ("a:\n  <<: 3\n", 2, "a", "unreadable-value"),
        ("? [x, y]\n: 1\n", 1, "file", "unreadable-key"),
        ("a: off\n", 1, "a", "unreadable-value"),
        ("a: !!timestamp soon\n", 1, "a", "unreadable-value"),
        ("a: !!bool maybe\n", 1, "a", "unreadable-value"),
        ("a: !!set {x, y}\n", 1, "a", "unreadable-value"),
        ("a: !!python/object/apply:os.system [x]\n", 1, "a", "unreadable-value"),
        ('a: "\\ud800.parquet"\n', 1, "a", "unreadable-value"),
        ('x: {"\\ud800": 1}\n', 1, "x", "unreadable-key"),
    ],
)
def test_smaller_faults_leave_the_rest_readable(tmp_path, content, line, place, fragment):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    (problem,) = read_document(path).problems
    assert (problem.line, problem.place) == (line, place)
    assert_code(problem, fragment)
