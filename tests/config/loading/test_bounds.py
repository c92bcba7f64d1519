"""Hostile files and overrides end in one sentence and exit code 2, within 3 s of CPU time and 1 GiB."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dagrl.config.errors import PipelineError
from dagrl.config.loading.yaml_source import read_document

MOST_LINE = 5000
"""A sentence that quotes a key or value of any length still fits a terminal."""
TINY = "extends: tiny_grpo\n"
"""What follows it is the file's only fault."""


def nested(levels: int, width: int, first: str, again: str) -> str:
    """Aliases that repeat aliases: `first`, then `levels` times `again`, with the one before it at each `@`."""
    lines = [f"k0: &a0 {first}"]
    lines += [f"k{level}: &a{level} {again.replace('@', f'*a{level - 1}', width)}" for level in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


NINE = ", ".join(["@"] * 9)
CHAIN = "".join(f"k{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 3000))
CONTENTS: dict[str, tuple[str | bytes, str]] = {
    "aliases in lists": (nested(9, 9, f"[{', '.join('xxxxxxxxx')}]", f"[{NINE}]"), "a pipeline may hold 10,000 values"),
    "aliases in mappings": (
        nested(9, 9, "{a: 1}", "{" + ", ".join(f"{key}: @" for key in "abcdefghi") + "}"),
        "with aliases (`*name`) expanded; shorten",
    ),
    "aliases as keys": (
        nested(9, 9, "[x]", "{? @ : @, b: @, c: @}"),
        "has more faults than the 100 reported here",
    ),
    "merges": (nested(9, 9, "{a: 1, b: 2}", f"{{<<: [{NINE}]}}"), "a pipeline may hold 10,000 values"),
    "merges one by one": (
        nested(40, 2, "{a: 1, b: 2}", "{<<: @, x: @}"),
        "a pipeline may hold 10,000 values",
    ),
    "an alias of a long text": (
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 4000)}]\n",
        "aliases (`*name`) repeat more than 512 KiB of text",
    ),
    "a chain of aliases": ("k0: &a0 [1]\n" + CHAIN, "is nested more than 50 levels deep"),
    "10 MB of a list": ("a: [" + "1, " * 3_500_000 + "1]\n", "is too large"),
    "10 MB of keys": ("".join(f"key_{number}: 1\n" for number in range(700_000)), "is too large"),
    "10 MB of comments": ("# nothing\n" * 1_000_000, "is too large"),
    "10 MB of blank lines": ("\n" * 10_000_000, "is too large"),
    "10 MB of one word": ("a: " + "x" * 10_000_000, "may have 512 KiB"),
    "a long list": (TINY + "track: [" + "x," * 150_000 + "]\n", "a pipeline may hold 10,000 values"),
    "a long block list": (TINY + "track:\n" + "- x\n" * 100_000, "a pipeline may hold 10,000 values"),
    "many keys": (TINY + "".join(f"k{number}: 1\n" for number in range(50_000)), "a pipeline may hold 10,000 values"),
    "many empty lists": (TINY + "a: [" + "[]," * 100_000 + "]\n", "a pipeline may hold 10,000 values"),
    "many anchors": (
        TINY + "a: [" + ",".join(f"&a{number} x" for number in range(40_000)) + "]\n",
        "a pipeline may hold 10,000 values",
    ),
    "100,000 open brackets": ("a: " + "[" * 100_000, "; close all open brackets"),
    "100,000 closed brackets": ("a: " + "[" * 100_000 + "]" * 100_000, "is nested more than 50 levels deep"),
    "100,000 open braces": ("a: " + "{a: " * 100_000, "is nested more than 50 levels deep"),
    "100,000 dashes": ("a:\n " + "- " * 100_000, "is nested more than 50 levels deep"),
    "100,000 complex keys": ("? " * 100_000, "is nested more than 50 levels deep"),
    "deep indentation": ("".join(" " * depth + "a:\n" for depth in range(500)), "is nested more than 50 levels deep"),
    "closing brackets": ("a: 1" + "\n]" * 100_000, "is not valid YAML"),
    "an open quote": ("a: '" + "x " * 200_000, "is not valid YAML: found unexpected end of stream"),
    "a long plain key": ("k" * 400_000 + ": 1\n", "has a `key:` where YAML allows none"),
    "a long complex key": (TINY + "? " + "k" * 400_000 + "\n: 1\n", "unknown key `kkkk"),
    "a long key of words": (TINY + "? " + "k " * 200_000 + "\n: 1\n", "unknown key"),
    "a long name of an alias": ("a: *" + "k" * 400_000 + "\n", "found undefined alias"),
    "a long anchor": (f"a: &{'k' * 100_000} 1\nb: &{'k' * 100_000} 2\n", "duplicate anchor"),
    "a long tag": (TINY + f"a: !{'k' * 100_000} 1\n", "write a plain value without a `!` tag"),
    "a long value": (TINY + f"run: {{steps: {'x' * 400_000}}}\n", "run.steps: got 'xxx"),
    "10,000 digits": (TINY + f"run: {{steps: 1{'0' * 10_000}}}\n", "a number of 10,001 characters is out of range"),
    "10,000 hexadecimal digits": (TINY + f"run: {{steps: 0x{'f' * 10_000}}}\n", "is out of range; write a shorter one"),
    "10,000 decimals": (TINY + f"run: {{val_temperature: 0.{'1' * 10_000}}}\n", "is out of range"),
    "a tagged sexagesimal number": (TINY + f"run: {{steps: !!float 1{':59' * 5000}}}\n", "is out of range"),
    "a short sexagesimal number": (TINY + "run: {steps: 1:30}\n", "run.steps: got '1:30'; it must be an integer"),
    "an exponent": (TINY + "run: {steps: 1e999999999}\n", "run.steps"),
    "duplicate anchors": (TINY + "a: &x 1\nb: &x 2\n", "duplicate anchor"),
    "a list within itself": (TINY + "track: &a [*a]\n", "an alias (`*name`) contains itself"),
    "lists within each other": (TINY + "track: &a [&b [*a, *b]]\n", "an alias (`*name`) contains itself"),
    "a document within itself": ("&a\nname: *a\nextends: tiny_grpo\n", "an alias (`*name`) contains itself"),
    "a merge of itself": (TINY + "run: &a {<<: *a}\n", "an alias (`*name`) contains itself"),
    "a merge of a number": (TINY + "run: {<<: 3}\n", "run: `<<` must name mappings"),
    "a merge of a list of texts": (TINY + "run: {<<: [a, b]}\n", "run: `<<` must name mappings"),
    "a merge of lists": (TINY + "run: {<<: [[{steps: 1}]]}\n", "run: `<<` must name mappings"),
    "many documents": ("---\na: 1\n" * 5_000, "found another document"),
    "no document": ("---\n...\n", "holds a single value, not a mapping"),
    "another version of YAML": ("%YAML 3.0\n---\na: 1\n", "is not valid YAML"),
    "many directives": ("%X\n" * 100_000, "is not valid YAML"),
    "an unknown tag handle": ("a: !x!y 1\n", "is not valid YAML"),
    "a Python object": (
        TINY + "run: !!python/object:os.system {}\n",
        "run: cannot be read as `python/object:os.system`",
    ),
    "a Python call": (TINY + "run: !!python/object/apply:os.system [id]\n", "write a plain value without a `!` tag"),
    "an ordered map": (TINY + "run: !!omap [a: 1]\n", "run: cannot be read as `omap`"),
    "bytes": (TINY + "run: {steps: !!binary aGk=}\n", "run.steps: cannot be read as `binary`"),
    "NUL bytes": (b"\0" * 1000, "contains the character #x00"),
    "a megabyte of NUL bytes": (b"\0" * 2**20, "is too large"),
    "UTF-16": ("name: x\n".encode("utf-16"), "is not text in UTF-8"),
    "UTF-16 without a mark": ("name: x\n".encode("utf-16-le"), "contains the character #x00"),
    "UTF-32": ("name: x\n".encode("utf-32"), "is not text in UTF-8"),
    "Latin-1": ("name: Zürich\n".encode("latin-1"), "is not text in UTF-8"),
    "half of a character": ("name: ü".encode()[:-1], "is not text in UTF-8"),
    "a byte order mark alone": (b"\xef\xbb\xbf", "is empty"),
    "a control character": ("name: a\x1b[31mb\n", "contains the character #x1b"),
    "a line separator in a key": (TINY + '"a\\Lb": 1\n', "unknown key `a\\u2028b`"),
    "a gzip file": (b"\x1f\x8b\x08\x00" + bytes(range(256)), "is not text in UTF-8"),
    "JSON that is cut short": ('{"name": "x", "run": {"steps": 1', "is not valid YAML"),
    "3,000 unknown keys": (
        TINY + "".join(f"k{number}: 1\n" for number in range(3000)),
        "has more faults than the 100 reported here",
    ),
    "3,000 keys that are null": (
        TINY + "".join(f"k{number}:\n" for number in range(3000)),
        "has more faults than the 100 reported here",
    ),
    "3,000 equal keys": (TINY + "name: x\n" * 3000, "has more faults than the 100 reported here"),
    "2,000 empty nodes": (
        TINY + "nodes:\n" + "".join(f" n{number}: {{}}\n" for number in range(2000)),
        "has more faults than the 100 reported here",
    ),
}
"""Name -> a file, and a part of what is said of it."""
LINES = {name: 101 for name, (_, said) in CONTENTS.items() if said.startswith("has more faults")}


def check(ended, fragment: str, *, lines: int = 1) -> None:
    """One sentence that says `fragment`, and exit code 2."""
    told = ended.err.splitlines()
    assert (ended.code, ended.out, len(told)) == (2, "", lines), f"exit code {ended.code}: {ended.err[:2000]}"
    assert any(fragment in line for line in told), ended.err[:2000]
    for line in told:
        assert "Traceback" not in line and "; " in line
        assert len(line) < MOST_LINE


@pytest.mark.parametrize("name", CONTENTS)
def test_a_hostile_file_is_one_sentence(tmp_path, bounded_dagrl, name: str) -> None:
    content, fragment = CONTENTS[name]
    path = tmp_path / "p.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    check(bounded_dagrl("validate", str(path)), fragment, lines=LINES.get(name, 1))


def make_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.yaml")
    return folder / "pipe.yaml"


def make_socket(folder: Path) -> Path:
    working = Path.cwd()
    os.chdir(folder)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind("socket.yaml")
    finally:
        os.chdir(working)
    return folder / "socket.yaml"


def make_loop(folder: Path) -> Path:
    (folder / "one.yaml").symlink_to("two.yaml")
    (folder / "two.yaml").symlink_to("one.yaml")
    return folder / "one.yaml"


def make_link(folder: Path, target: str) -> Path:
    (folder / "link.yaml").symlink_to(target)
    return folder / "link.yaml"


def make_sparse(folder: Path) -> Path:
    with (folder / "sparse.yaml").open("wb") as file:
        file.truncate(2**40)
    return folder / "sparse.yaml"


def make_folder(folder: Path) -> Path:
    (folder / "folder.yaml").mkdir()
    return folder / "folder.yaml"


def make_file_as_folder(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "p.yaml"


PATHS: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "a named pipe": (make_fifo, "is no regular file; give the pipeline's YAML file"),
    "a link to a named pipe": (lambda folder: make_link(folder, make_fifo(folder).name), "is no regular file"),
    "a socket": (make_socket, "is no regular file"),
    "/dev/zero": (lambda _: "/dev/zero", "is no regular file"),
    "/dev/null": (lambda _: "/dev/null", "is no regular file"),
    "a link to /dev/zero": (lambda folder: make_link(folder, "/dev/zero"), "is no regular file"),
    "a folder": (make_folder, "is a folder; give the pipeline's YAML file"),
    "links that loop": (make_loop, "cannot be read: Too many levels of symbolic links"),
    "a link to itself": (lambda folder: make_link(folder, "link.yaml"), "Too many levels of symbolic links"),
    "a link to nowhere": (lambda folder: make_link(folder, "gone.yaml"), "does not exist; check the path"),
    "a file of a terabyte": (make_sparse, "is too large"),
    "a file below a file": (make_file_as_folder, "cannot be read: Not a directory"),
    "an empty path": (lambda _: "", "expected a path"),
    "standard input": (lambda _: "-", "does not exist"),
    "line breaks": (lambda folder: f"{folder}/a\nb\r.yaml", "a\\nb\\r.yaml:1: file: does not exist"),
    "a path with spaces": (lambda folder: f"{folder}/a b.yaml", "does not exist"),
    "a path of 5,000 letters": (lambda _: "a" * 5000 + ".yaml", "is longer than file systems take"),
    "a path of many folders": (lambda _: "a/" * 3000 + "p.yaml", "is longer than file systems take"),
    "bytes that are no UTF-8": (lambda folder: f"{folder}/\udcff.yaml", "\\udcff.yaml:1: file: does not exist"),
    "NUL": (lambda _: "a\0b.yaml", "expected a path"),
    "a folder of the kernel": (lambda _: "/proc/self", "is a folder"),
    "the kernel's memory map": (lambda _: "/proc/self/maps", "holds a single value"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_to_no_pipeline_is_one_sentence(tmp_path, bounded_dagrl, name: str) -> None:
    make, fragment = PATHS[name]
    ended = bounded_dagrl("validate", str(make(tmp_path)))
    assert fragment in ended.err
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (2, "", 1), ended.err[:2000]


@pytest.mark.parametrize("name", [name for name in PATHS if name not in ("an empty path", "standard input")])
def test_a_path_that_a_file_extends_is_one_sentence(tmp_path, bounded_dagrl, name: str) -> None:
    (tmp_path / "child").mkdir()
    parent = str(PATHS[name][0](tmp_path))
    child = tmp_path / "child" / "child.yaml"
    child.write_text(f"extends: {json.dumps(parent if parent.startswith('/') else f'./{parent}')}\n")
    ended = bounded_dagrl("graph", str(child))
    told = ended.err.splitlines()
    assert (ended.code, ended.out, len(told)) == (2, "", 1), ended.err[:2000]
    assert "Traceback" not in told[0] and "; " in told[0]


def test_a_file_that_may_not_be_read_is_one_sentence() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        path = Path(name) / "p.yaml"
        path.write_text(TINY)
        path.chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(PipelineError, match="cannot be read: Permission denied; check the path"):
                read_document(path)
        finally:
            os.seteuid(before)


def write_chain(folder: Path) -> str:
    for number in range(100):
        (folder / f"c{number}.yaml").write_text(f"extends: ./c{number + 1}.yaml\n")
    (folder / "c100.yaml").write_text(TINY)
    return "./c0.yaml"


def write_itself(folder: Path, link: Callable[[Path, Path], None]) -> str:
    link(folder / "child.yaml", folder / "again.yaml")
    return "./again.yaml"


def write_bomb(folder: Path) -> str:
    (folder / "bomb.yaml").write_text(CONTENTS["merges"][0])
    return "./bomb.yaml"


def write_halves(folder: Path) -> str:
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(f"{name}: [{'1,' * 6000}]\n")
    return "[./one.yaml, ./two.yaml]"


PARENTS: dict[str, tuple[Callable[[Path], str], str]] = {
    "a chain of 100 files": (write_chain, "a pipeline may extend 31 files; put some of them into one"),
    "10,000 files": (lambda _: f"[{', '.join(['grpo'] * 9_000)}]", "extends 9,000 files, of which 32 are the most"),
    "itself through a link": (lambda f: write_itself(f, lambda to, at: at.symlink_to(to)), "in a circle"),
    "itself under a second name": (lambda f: write_itself(f, lambda to, at: at.hardlink_to(to)), "in a circle"),
    "a bomb": (write_bomb, "bomb.yaml:"),
    "two files that are too large together": (write_halves, "a pipeline may hold 10,000 values"),
    "a bomb of its own": (lambda _: "&a [[*a, *a]]", "an alias (`*name`) contains itself"),
    "a number": (lambda _: "3", "expected a template's name or a file's path"),
    "a list of lists": (lambda _: "[[grpo]]", "expected a template's name or a file's path"),
    "null": (lambda _: "~", "expected a template's name or a file's path"),
    "a template of another case": (lambda _: "GRPO", "did you mean `grpo` or"),
}


@pytest.mark.parametrize("name", PARENTS)
def test_the_extended_files_are_bounded(tmp_path, bounded_dagrl, name: str) -> None:
    write, fragment = PARENTS[name]
    child = tmp_path / "child.yaml"
    child.touch()
    child.write_text(f"extends: {write(tmp_path)}\n")
    ended = bounded_dagrl("validate", str(child))
    assert fragment in ended.err and "Traceback" not in ended.err
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) <= 3


OVERRIDES = {
    "100,000 parts": (".".join(["a"] * 60_000) + "=1", "is nested more than 50 levels deep"),
    "2,000 parts": (".".join(["a"] * 2_000) + "=1", "is nested more than 50 levels deep"),
    "2,000 parts of a section that is free": ("model.init." + ".".join(["a"] * 2_000) + "=1", "50 levels deep"),
    "60 parts": (".".join(["a"] * 60) + "=1", "is nested more than 50 levels deep"),
    "a deep value": ("run=" + "[" * 60_000, "is nested more than 50 levels deep"),
    "a deep key and a deep value": ("a." * 30 + "a=" + "[" * 30 + "]" * 30, "is nested more than 50 levels deep"),
    "a bomb": (f"run=[&a [{'x,' * 99}x], &b [{'*a,' * 99}*a], [{'*b,' * 99}*b]]", "a pipeline may hold 10,000 values"),
    "a long list": (f"track=[{'x,' * 50_000}]", "a pipeline may hold 10,000 values"),
    "a list within itself": ("track=&a [*a]", "an alias (`*name`) contains itself"),
    "an alias of nothing": ("run.steps=*a", "the value is not valid YAML; put it in quotes"),
    "an open quote": ("name='x", "the value is not valid YAML; put it in quotes"),
    "an open brace": ("run={steps: 3", "the brackets are not closed"),
    "an anchor alone": ("run.steps=&a", "run.steps"),
    "two documents": ("run=---\n{}\n---\n{}", "the value is not valid YAML"),
    "no key": ("=1", "is not KEY=VALUE"),
    "a point": (".=1", "is not KEY=VALUE"),
    "points": ("...=1", "is not KEY=VALUE"),
    "a point at the end": ("run.=1", "is not KEY=VALUE"),
    "a point at the beginning": (".run=1", "is not KEY=VALUE"),
    "nothing": ("", "is not KEY=VALUE"),
    "equals signs": ("===", "is not KEY=VALUE"),
    "a key with an equals sign": ("run.steps==3", "run.steps==3: got '=3'; it must be an integer"),
    "spaces around the key": (" run.steps =3", "unknown key ` run`"),
    "a key of 100,000 letters": ("a" * 100_000 + "=1", "unknown key `aaaa"),
    "a key in another alphabet": ("запуск.шаги=1", "unknown key `запуск`"),
    "a key with a line break": ("run\n.steps=1", "unknown key `run\\n`"),
    "a key with NUL": ("run.st\0eps=1", "unknown key `st\\x00eps`"),
    "a value with NUL": ("name=a\0b", "the value contains the character #x00"),
    "a key that is no UTF-8": ("run.\udcff=1", "the key contains half of a surrogate pair"),
    "a value that is no UTF-8": ("name=\udcff", "#xdcff"),
    "10,000 digits": (f"run.steps={'9' * 10_000}", "a number of 10,000 characters is out of range"),
    "a tag": ("run.steps=!!python/name:os.system x", "write a plain value without a `!` tag"),
    "an index": ("track[0]=wandb", "unknown key `track[0]`"),
    "an index as a part": ("track.0=wandb", "`track` is not a section"),
    "dashes": ("run-steps=3", "unknown key `run-steps`"),
    "a key within text": ("name.x=3", "`name` is not a section"),
    "a colon": ("run.steps:3", "is not KEY=VALUE"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_hostile_override_is_one_sentence(tmp_path, bounded_dagrl, name: str) -> None:
    override, fragment = OVERRIDES[name]
    path = tmp_path / "p.yaml"
    path.write_text(TINY)
    # Reads as `validate` does, and leaves out the checks that follow.
    check(bounded_dagrl("graph", str(path), override), fragment)


def test_very_many_overrides_are_one_sentence(tmp_path, bounded_dagrl) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(TINY)
    overrides = [f"model.init.k{number % 3000}=[1, 2]" for number in range(20_000)]
    check(bounded_dagrl("validate", str(path), *overrides), "a pipeline may hold 10,000 values")


def test_many_values_and_deep_ones_within_the_bounds_are_read(tmp_path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"a: [{'1,' * 9_000}]\nb: {'[' * 45}1{']' * 45}\nc: &c {'x' * 100_000}\nd: [*c, *c]\n")
    tree = read_document(path).tree
    assert len(tree["a"]) == 9_000
    assert len(tree["d"][1]) == 100_000


@pytest.mark.parametrize("key", ["data.train", "data.val", "model.path", "model.tokenizer"])
def test_a_loop_of_links_is_reported(tmp_path, bounded_dagrl, key: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(TINY)
    loop = make_loop(tmp_path)
    ended = bounded_dagrl("validate", str(path), f"{key}={loop}")
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err and f"override {key}={loop}" in ended.err
