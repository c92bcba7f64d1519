"""Bash runs a script and traces its calls; without bash, scripts of assignments and calls are read."""

import re

import pytest

from dagrl.importing import script as scripts
from dagrl.importing.importer import import_file
from dagrl.importing.script import read_script
from dagrl.importing.settings import ImportProblem

RUN = re.compile(r"(?:^|\s)run\s")
PROGRAM = "python3 -m verl.trainer.main_ppo"


def words_of(path, text, arguments=(), variables=None):
    path.write_text(text)
    script = read_script(path, RUN, arguments, variables)
    return [[word.text for word in command[1:]] for command in script.commands], script


@pytest.fixture
def without_sandbox(monkeypatch):
    def refuse(*_, **__):
        raise OSError("the kernel has no Landlock")

    monkeypatch.setattr(scripts, "run_bash", refuse)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1\nrun $A", ["set"]),  # a variable of the caller replaces the script's
        ("(( A++ ))\nfor A in x; do run $A; done", ["set"]),
        ("f() { local A=3 B=$1; run $B $A; }\nf q", ["q", "set"]),
        ("N=4\n(( N *= 2 ))\nrun $N || run $N $LATER", ["8"]),
        ("N=$((UNSET * 8))\nrun $N ${UNSET}/x ${OTHER:-3}", ["$N", "$UNSET/x", "3"]),
        ('if [ -z "${UNSET:-}" ]; then echo "set it" >&2; exit 1; fi\nrun "$UNSET"', ["$UNSET"]),
        ("run ~/a $HOME/b $PWD/c '$A' $'a\\nb'", ["~/a", "~/b", "./c", "$A", "a\nb"]),
        ("run $(date +%s) $(nvidia-smi | wc -l) $(echo a b)", ["$(date)", "$(wc)", "a", "b"]),
        ('run "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/x" $(basename a/b.sh .sh)', ["FOLDER/x", "b"]),
        ('C=(run "x \\$A" -y)\neval "${C[@]}"', ["x", "set", "-y"]),
        ("source other.sh\nrun $FROM", ["other"]),
        ("cd no/such/folder\nset -euo pipefail\nfalse\nexec run a 2>&1 | tee log", ["run", "a"]),
        ("nohup env X=1 run a > /no/such/folder/log 2>&1 &", ["env", "X=1", "run", "a"]),
        ("python3 - <<'EOF'\nimport os\nEOF\nwhile ! nc -z host 80; do sleep 1; done\nrun $(seq 2 2 4)", ["2", "4"]),
        ("declare -A C=([lr]=1e-5)\nA=(a 'b c')\nA+=(d)\nrun ${C[lr]} \"${A[@]:1}\" $2", ["1e-5", "b c", "d", "$2"]),
        ("run $1 $2 $3", ["one", "$2", "$3"]),
    ],
)
def test_words_of_a_call(tmp_path, text, words):
    (tmp_path / "other.sh").write_text("FROM=other\n")
    found, _ = words_of(tmp_path / "s.sh", text + "\n", ["one"], {"A": "set"})
    assert found == [[word.replace("FOLDER", str(tmp_path)) for word in words]]


def test_settings_have_the_lines_of_their_words(tmp_path):
    _, script = words_of(
        tmp_path / "s.sh", "# --lr 2\nA=(run\n  --lr 1\n\n  --lr-decay 1 'n=2')\nn=$N\n\"${A[@]}\" m=3\n"
    )
    assert [(word.text, word.line) for word in script.commands[0] if word.text[0] in "-mn"] == [
        ("--lr", 3),
        ("--lr-decay", 5),
        ("n=2", 5),
        ("m=3", 7),
    ]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("run 1\nif [ -f x ]; then B=2; fi\n", 2, "depends on the machine"),
        ("case $UNSET in a) B=1 ;; esac\n", 1, "--set UNSET=VALUE"),
        ("if nvidia-smi | grep -q H100; then\n  B=2\nelse\n  B=4\nfi\n", 1, "programs are taken to succeed"),
        ("\nsource no.sh\n", 2, "does not exist here"),
        ("N=1\nrun $((UNSET * N))\n", 2, "--set UNSET=VALUE"),
        ("if [ -z $UNSET ]; then echo usage; fi\nif [ -n x ]; then B=2; fi\n", None, ""),
    ],
)
def test_parts_that_depend_on_the_environment_are_remarked(tmp_path, text, line, said):
    _, script = words_of(tmp_path / "s.sh", text)
    assert [(each.line, said in each.message) for each in script.remarks] == ([(line, True)] if line else [])


def test_a_script_executes_and_writes_nothing(tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    marker, text = tmp_path / "marker", f"run $({program}) $(/bin/echo ran)"
    found, _ = words_of(
        tmp_path / "s.sh", f"touch {marker}\n/bin/touch {marker}\n: > {marker}\n{text} `touch {marker}` x\n"
    )
    assert found == [["$(touch)", "x"]]
    assert not marker.exists()


def test_a_script_reads_its_own_folder_or_repository_alone(tmp_path):
    folder = tmp_path / "repository" / "examples"
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    folder.mkdir()
    (tmp_path / "repository" / "models.sh").write_text("MODEL=m\n")
    (tmp_path / "secret.sh").write_text("SECRET=s\n")
    text = (
        'D=$(dirname "$0")/..\nsource $D/models.sh\nsource $D/../secret.sh\nrun $MODEL "$(<$D/../secret.sh)" $SECRET\n'
    )
    assert words_of(folder / "s.sh", text)[0] == [["m", "", "$SECRET"]]


def test_without_a_sandbox_assignments_and_calls_are_read(tmp_path, without_sandbox):
    text = "set -x\nexport N=${N:-3}  # nodes\nM=\"$HOME/m\"\nrun a=$N \\\n  b=$M c=${UNSET} '$2' $@\n"
    found, script = words_of(tmp_path / "s.sh", text, ["one", "x y"], {"M": "n"})
    assert found[-1] == ["a=3", "b=n", "c=$UNSET", "x y", "one", "x y"]
    assert [word.line for word in script.commands[-1]] == [4, 4, 5, 5, 5, 5, 5]
    assert script.commands[-1][3].missing == ("$UNSET",)
    (tmp_path / "v.sh").write_text(f"{PROGRAM} \\\n  trainer.nnodes=2\n")
    assert import_file(tmp_path / "v.sh").translation.tree["groups.gpus.nodes"] == 2


@pytest.mark.parametrize("beyond", ["if true; then A=1; fi", "A=(1 2)", "A=$(date)", "f() {", "source x", "A=${B%x}"])
def test_without_a_sandbox_other_scripts_are_refused(tmp_path, without_sandbox, beyond):
    with pytest.raises(ImportProblem, match=r"s.sh:2: .*bash does not run here \(the kernel has no Landlock\)"):
        words_of(tmp_path / "s.sh", f"A=1\n{beyond}\nrun $A\n")
