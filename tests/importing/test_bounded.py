"""Files that would take all time or memory, or that are no scripts, are refused by one sentence."""

import os
import re
from pathlib import Path

import pytest

from dagrl.importing import script
from dagrl.importing.importer import import_file
from dagrl.importing.settings import ImportProblem
from dagrl.importing.yaml_source import read_yaml

CALL = "\npython -m verl.trainer.main_ppo data.train_batch_size=8 trainer.nnodes=${N:-2}\n"
EXPLORER = "actor_rollout_ref: {rollout: {n: 4}}\n"
LIMIT, DEEP = "reading it takes more than", "too deeply"
EITHER = f"{LIMIT}|{DEEP}"
LOOP = "for i in $(seq 1 99); do"


@pytest.fixture(autouse=True)
def _tight(monkeypatch):
    monkeypatch.setattr(script, "_CPU_SECONDS", 1)
    monkeypatch.setattr(script, "_MEMORY_MIB", 96)
    monkeypatch.setattr(script, "_SECONDS", 60)  # A busy machine must not look like a hostile file.


def said_of(path: Path, *arguments: str) -> str:
    with pytest.raises(ImportProblem) as problem:
        import_file(path, arguments)
    assert "\n" not in str(problem.value)
    assert str(problem.value).startswith(str(path))
    assert len(str(problem.value)) < 300
    return str(problem.value)


@pytest.mark.parametrize(
    "text",
    [
        f"A=xxxxxxxx\n{LOOP} A=$A$A; done",
        f'A=(a b)\n{LOOP} A=("${{A[@]}}" "${{A[@]}}"); done',
        f"A={'a' * 30000}\nB=${{A##{'*a' * 30}b}}",
        "while :; do :; done",
        'source "$0"',
        "A='eval $A; eval $A'\neval $A",
        "f() { f; f; }\nf",
    ],
)
def test_scripts_without_end(tmp_path, text):
    (tmp_path / "run.sh").write_text(text + CALL)
    assert LIMIT in said_of(tmp_path / "run.sh")


def test_a_script_that_does_not_end_after_its_call_is_read(tmp_path):
    (tmp_path / "run.sh").write_text(f"{CALL}while :; do :; done\n")
    found = import_file(tmp_path / "run.sh")
    assert found.translation.tree["groups.gpus.nodes"] == 2
    assert [LIMIT in remark.message for remark in found.remarks] == [True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a0: xxxxxxxx\n" + "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 39)), "characters"),
        ("a: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)), "values"),
        ("a: &a {b: *a}\n", DEEP),
        ("a: " + "[" * 3000 + "]" * 3000 + "\n", EITHER),
        ("a: &a {<<: 1}\n", "yaml:2: is not YAML: expected a mapping"),
        ("a: !!int abc\n", "yaml:2: the value of a is not of YAML's type `int`"),
        ("a: !!timestamp abc\n", "type `timestamp`"),
        ("a: 2026-99-99\n", "type `timestamp`"),
        (f"a: {'1' * 6000}\n", "type `int`"),
        ("a: !!python/name:os.system ''\n", "is not YAML"),
        ("a: \x01\n", "is not YAML"),
    ],
)
def test_yaml_without_end_or_sense(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(EXPLORER + text)
    assert re.search(said, said_of(tmp_path / "c.yaml"))


def test_only_texts_in_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "fifo.sh").symlink_to("fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "itself.sh").symlink_to("itself.sh")
    (tmp_path / "long.sh").write_text("#" * (2 << 20))
    (tmp_path / "utf16.sh").write_text(CALL, encoding="utf-16")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    for name, said in (
        *((name, "not a regular file") for name in ("fifo.yaml", "fifo.sh", "zero.yaml", "folder.yaml")),
        ("itself.sh", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("long.sh", "more than 1048576 bytes"),
        ("utf16.sh", "not a text"),
        ("binary.yaml", "not a text"),
    ):
        with pytest.raises(ImportProblem, match=said):
            import_file(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "a=b; b=a; N=$((a))",
        f"M=$(({'(' * 3000}1{')' * 3000}))",
        "source /proc/self/mem",
        "source /dev/zero",
        "set -e; false; no_such_program; exit 1",
        'echo "${UNSET?}"\nset -u; echo $UNSET',
        "exec > /nowhere/log 2>&1; exec 3< /nowhere",
        'set +x; trap "" DEBUG',
        f"source {'a' * 5000}",
        f"A=({'1' * 6000})\nA[{'9' * 6000}]=3",
        f"if [ {'1' * 6000} -gt 3 ]; then A=1; fi",
        "set -- a b\nshift ²\nshift 9",
        f"shift {'1' * 6000}",
        "declare -A C=([²]=x)\nC+=(y)",
    ],
)
def test_odd_words_leave_the_rest_readable(tmp_path, text):
    (tmp_path / "run.sh").write_text(text + CALL)
    assert import_file(tmp_path / "run.sh").translation.tree["groups.gpus.nodes"] == 2


def test_a_number_of_too_many_digits_is_a_text(tmp_path):
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo trainer.experiment_name=$1 trainer.seed=$(($1))\n"
    )
    found = import_file(tmp_path / "run.sh", ["1" * 6000]).translation
    assert found.tree["name"] == "1" * 200
    assert found.tree["run.seed"] < 2**63


def test_a_fault_of_the_importer_is_a_sentence(tmp_path, monkeypatch):
    def fault(*_):
        raise KeyError("x\ny")

    monkeypatch.setattr("dagrl.importing.importer.read_source", fault)
    assert "fault of dagrl (KeyError: " in said_of(tmp_path / "run.sh")


def test_mappings_that_merge_each_other_are_read_once(tmp_path):
    merges = "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}], k{i}: 1}}\n" for i in range(1, 40))
    (tmp_path / "c.yaml").write_text(f"m0: &m0 {{k0: 1}}\n{merges}a: &a {{<<: *a, b: 1}}\n")
    keys = [setting.key for setting in read_yaml(tmp_path / "c.yaml")]
    assert len(keys) == sum(range(1, 41)) + 1
    assert (keys[-2], keys[-1]) == ("m39.k39", "a.b")
