"""The parser is compared with bash itself, which runs scripts that only print their words."""

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.importing.shell.script import read_script

BASH = shutil.which("bash")
ARGUMENTS = ["one", "two", "three"]
needs_bash = pytest.mark.skipif(BASH is None, reason="needs bash")


def words_of(path, text, arguments=(), variables=None):
    path.write_text(text)
    script = read_script(path, arguments, variables)
    return [[word.text for word in command[1:]] for command in script.commands if command[0].text == "run"], script


def bash_words(text, arguments=()):
    text = "run() { printf '%s\\0' CALL \"$@\"; }\n" + text
    done = subprocess.run([BASH, "-c", text, "script", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    calls = []
    for word in done.stdout.split("\0")[:-1]:
        if word == "CALL":
            calls.append([])
        else:
            calls[-1].append(word)
    return calls


_PLAIN = st.text("ab1 ./:=_-", max_size=6)
_NAMES = st.sampled_from(["A", "B", "C"])
_QUOTED = _PLAIN.map(lambda text: f"'{text}'")
_BARE = st.text("ab1./_-", min_size=1, max_size=5)
_EXPANSIONS = st.one_of(
    _NAMES.map(lambda name: f"${{{name}}}"),
    _NAMES.map(lambda name: f"${name}/"),
    st.tuples(_NAMES, st.sampled_from([":-", "-", ":+", "+"]), _BARE).map(lambda p: f"${{{p[0]}{p[1]}{p[2]}}}"),
    st.tuples(_NAMES, _NAMES, _BARE).map(lambda p: f"${{{p[0]}:-${{{p[1]}:-{p[2]}}}}}"),
    st.tuples(_NAMES, st.sampled_from(["#", "##", "%", "%%"]), st.sampled_from(["a", "*a", "b*", "1"])).map(
        lambda p: f"${{{p[0]}{p[1]}{p[2]}}}"
    ),
    st.tuples(st.integers(-9, 99), st.sampled_from("+-*/%"), st.integers(1, 9)).map(
        lambda p: f"$(( {p[0]} {p[1]} {p[2]} ))"
    ),
)
_PIECES = st.one_of(
    _BARE, _QUOTED, _EXPANSIONS, _EXPANSIONS.map(lambda e: f'"{e}"'), _EXPANSIONS.map(lambda e: f'"x {e} y"')
)
_WORDS = st.lists(_PIECES, min_size=1, max_size=3).map("".join)
_ARRAYS = st.lists(_WORDS, max_size=3).map(lambda words: "(\n  " + " # comment\n  ".join(words) + "\n)")
_VALUES = st.one_of(_QUOTED, _BARE, _EXPANSIONS.map(lambda e: f'"{e}"'))
_STATEMENTS = st.one_of(
    st.tuples(_NAMES, _VALUES).map(lambda p: f"{p[0]}={p[1]}"),
    st.tuples(_NAMES, _VALUES).map(lambda p: f"export {p[0]}={p[1]}"),
    st.tuples(_NAMES, _NAMES, _VALUES).map(lambda p: f"{p[0]}={p[2]} {p[1]}={p[2]}"),
    _ARRAYS.map(lambda array: f"ARGS={array}"),
    _ARRAYS.map(lambda array: f"ARGS+={array}"),
    _WORDS.map(lambda word: f'run {word} \\\n  "${{ARGS[@]}}" $@'),
    _WORDS.map(lambda word: f'run ${{ARGS[@]}} "$@" {word}'),
    st.tuples(_NAMES, _PLAIN, _NAMES).map(
        lambda p: f"if [ \"${p[0]}\" = '{p[1]}' ]; then {p[2]}=then; else {p[2]}=else; fi"
    ),
    st.tuples(_NAMES, st.text("ab1", min_size=1, max_size=2)).map(
        lambda p: f'[[ "${p[0]}" == {p[1]}* ]] && run yes || run no'
    ),
    st.tuples(_NAMES, _NAMES).map(
        lambda p: f'case "${p[0]}" in a*) {p[1]}=a ;; b|1) {p[1]}=b ;; *) {p[1]}=other ;; esac'
    ),
    _WORDS.map(lambda word: f"for each in x {word}; do run $each; done"),
)


@needs_bash
@settings(max_examples=60, deadline=None)
@given(st.lists(_STATEMENTS, min_size=1, max_size=8), st.lists(_PLAIN, max_size=2))
def test_words_are_those_that_bash_would_pass(tmp_path_factory, statements, arguments):
    text = "\n".join(["A=a/b1 B='b a' C=", "ARGS=()", *statements, 'run "$A" "$B" "$C" ${ARGS[@]}']) + "\n"
    found, script = words_of(tmp_path_factory.mktemp("script") / "s.sh", text, arguments)
    assert found == bash_words(text, arguments)
    assert script.remarks == []


@needs_bash
@pytest.mark.parametrize(
    "text",
    [
        "N=4\n(( N *= 2 ))\nlet M=N+1 K=2\nrun $N $M $K $((N++)) $N $((--N)) $((M = 3, M << 2)) $M",
        "N=1\n((N++)) && run yes $N\n(( N > 5 )) || run no",
        "declare -A C=([lr]=1e-5 [qwen-7b]='x y')\nC[n]=16 K=n\nrun ${C[$K]} ${C[lr]} \"${C[qwen-7b]}\" ${#C[@]}",
        'A=(a b c) i=1\nA[${#A[@]}]=z\nA+=" q"\nA[6]=far\nrun "${A[@]}" ${A[i+1]} ${A[-1]} ${#A[@]}',
        'A=(a "b c")\nA=("${A[@]}" [5]=d e)\nrun "${A[@]}" ${#A[@]}',
        'B=text\nrun "${@:2}" ${@:1:1} "${*:2}" ${B:0:2} ${B: -3} "${B:0:-1}" "${B:9}"',
        "C=\"run 'my run' x\"\neval $C\neval \"$C 2>&1 | cat\"\neval 'N=4; M=$N'\nrun $M\neval N=5\nrun $N",
        'A=(a "b c" d)\nrun "${A[@]:1}" ${A[@]:0:2} "${A[@]: -1}"',
    ],
)
def test_scripts_have_the_words_of_bash(tmp_path, text):
    found, script = words_of(tmp_path / "s.sh", f"{text}\n", ARGUMENTS)
    assert found == bash_words(text, ARGUMENTS)
    assert script.remarks == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1\nrun $A", ["set"]),  # a variable of the caller replaces the script's
        ("(( A++ ))\nfor A in x; do run $A; done", ["set"]),
        ("N=4\n(( N += UNSET ))\nrun $N", ["$N"]),
        ("X=(a b)\nrun ${X[$UNSET]} ${@:$UNSET}", ["${X[$UNSET]}", "${@:$UNSET}"]),
        ("run $B.$HOME/x", ["$B.~/x"]),
        ("run $(date) $(echo a b)", ["$(date)", "a", "b"]),
        ('run "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/x"', ["FOLDER/x"]),
        ('C=(run "x \\$A" -y)\neval "${C[@]}"', ["x", "set", "-y"]),
        ("f() { local A=3 B=$1; run $B $A; }\nf q", ["q", "set"]),
        ("source other.sh\nrun $FROM", ["other"]),
        ("while true; do A=2; done\nrun ok", ["ok"]),
    ],
)
def test_what_only_the_environment_knows(tmp_path, text, words):
    (tmp_path / "other.sh").write_text("FROM=other\n")
    found, _ = words_of(tmp_path / "s.sh", text + "\n", variables={"A": "set"})
    assert found == [[word.replace("FOLDER", str(tmp_path)) for word in words]]


def test_what_eval_expands_stays_at_its_line(tmp_path):
    found, script = words_of(tmp_path / "s.sh", "B=(x\n  y)\nA=(run\n  'b c'\n\n  'd e')\neval ${A[@]} ${B[@]}\n")
    assert found == [["b", "c", "d", "e", "x", "y"]]
    assert [word.line for word in script.commands[0]] == [3, 4, 4, 6, 6, 1, 2]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("run 1\nif [ -f x ]; then B=2; fi\n", 2, "condition depends"),
        ("case $UNSET in a) B=1 ;; esac\n", 1, "--set UNSET=VALUE"),
        ("if nvidia-smi | grep -q H100; then B=2; else B=4; fi\n", 1, "condition depends"),
        ("if ! command -v uv; then B=2; fi\n", 1, "condition depends"),
        ("\nsource no.sh\n", 2, "not here"),
    ],
)
def test_parts_that_are_left_out_are_remarked(tmp_path, text, line, said):
    _, script = words_of(tmp_path / "s.sh", text)
    assert [(each.line, said in each.message) for each in script.remarks] == [(line, True)]


def test_nothing_is_executed(tmp_path):
    marker = tmp_path / "marker"
    words_of(tmp_path / "s.sh", f"touch {marker}\nX=$(touch {marker})\nrun `touch {marker}` <(touch {marker})\n")
    assert not marker.exists()
