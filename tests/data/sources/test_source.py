"""Sources: rows of files in any format by number, in any order, with places and bounded memory."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.config.loading import prompt_files
from dagrl.config.schema import SourceSpec, TrainSourceSpec, ValSetSpec
from dagrl.data.sources import Source, open_source, parts
from dagrl.data.sources import source as source_module


def rows_of(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{number} + 1 = ü"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number, "note": None},
        }
        for number in range(first, first + count)
    ]


def opened(*paths: Path | str, **options: Any) -> Source:
    return open_source("sums", SourceSpec(path=tuple(map(Path, paths)), **options))


def test_each_format_gives_the_same_rows_in_any_order(written) -> None:
    rows = rows_of(23)
    source = opened(written(rows))
    assert len(source) == 23
    order = random.Random(1).choices(range(23), k=60)
    found = source.values(order, ["prompt", "reward_model.ground_truth", "extra_info", "absent"])
    assert found["prompt"] == [rows[row]["prompt"] for row in order]
    assert [each["ground_truth"] for each in found["reward_model"]] == [str(row + 1) for row in order]
    assert found["extra_info"] == [rows[row]["extra_info"] for row in order]
    assert found["absent"] == [None] * 60
    assert source.values([], ["prompt"]) == {"prompt": []}


def test_files_of_several_formats_are_one_table(tmp_path, written) -> None:
    first = written(rows_of(10))
    pq.write_table(pa.Table.from_pylist(rows_of(4, first=10)), tmp_path / "z.parquet")
    (tmp_path / "z.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(3, first=14)))
    source = opened(first, tmp_path / "z.parquet", tmp_path / "z.jsonl")
    found = source.values(np.arange(17)[::-1], ["extra_info"])["extra_info"]
    assert [each["index"] for each in found] == [*range(16, -1, -1)]
    assert source.place(12) == f"{tmp_path}/z.parquet, row 2 (the first is 0)"
    assert source.place(16) == f"{tmp_path}/z.jsonl:3"
    assert source.folder(12) == tmp_path


def test_rows_of_lines_are_named_by_line(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n\n\n{"prompt": "b"}\n')
    source = opened(tmp_path / "a.jsonl")
    assert [source.place(row) for row in (0, 1)] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:4"]
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    assert opened(tmp_path / "a.json").place(1) == f"{tmp_path}/a.json, row 1 (the first is 0)"


def test_a_file_that_is_changed_is_copied_again(tmp_path, cache) -> None:
    path = tmp_path / "a.jsonl"
    for count in (2, 3):
        path.write_text('{"prompt": "a"}\n' * count)
        assert len(opened(path)) == len(opened(path)) == count
        assert len([*cache.iterdir()]) == 1


BROKEN: dict[str, tuple[bytes, str]] = {
    "a line that is not JSON": (b'{"prompt": "a"}\n{"prompt": \n', "bad.jsonl:2: no row of JSON"),
    "a line that is no object": (b'{"prompt": "a"}\n\n[1]\n', "bad.jsonl:3: no object with fields, but [1]"),
    "no UTF-8": (b'{"prompt": "\xff"}\n', "bad.jsonl:1: no row of JSON"),
    "a nested line": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad.jsonl:1: no row of JSON"),
    "half a gzip": (gzip.compress(b'{"prompt": "a"}\n' * 99)[:-9], " cannot be unpacked (Compressed file ended"),
    "gzip with noise": (gzip.compress(b'{"prompt": "a"}\n')[:12] + bytes(9), "bad.jsonl:1 cannot be unpacked"),
    "a list without an end": (b'[{"prompt": "a"}, {"prompt": "b"}', "bad.jsonl, row 1"),
    "a list with a wrong item": (b'[{"prompt": "a"}, {"prompt": ]', "is not JSON"),
    "a list of texts": (b'["a"]', "bad.jsonl, row 0 (the first is 0): no object with fields"),
    "two lists": (b'[{"prompt": "a"}]\n[{"prompt": "b"}]', 'bad.jsonl:2: \'[{"prompt": "b"}]\' follows the end'),
    "text behind a list": (b'\n[\n{"prompt": "a"}]\n\n more', "bad.jsonl:5: 'more' follows the end of the list"),
    "lists in lines": (b'["a"]\n["b"]\n', "bad.jsonl:2: '[\"b\"]\\n' follows the end of the list"),
    "an object behind a list": (b'[{"prompt": "a"}] {"prompt": "b"}', "bad.jsonl:1: '{"),
    "text far behind a list": (
        b'[{"prompt": "a"}]' + b"\n" * (2 << 20) + b"]",
        f"bad.jsonl:{(2 << 20) + 1}: ']' follows",
    ),
    "a list behind a large one": (
        b"[" + b",\n".join([b'{"prompt": "%s"}' % (b"a" * 99)] * 20_000) + b"]\n[]",
        "bad.jsonl:20001: '[]' follows the end",
    ),
    "a nested list": (b'[{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "bad.jsonl, row 0 (the first is 0)"),
    "a list with a long number": (b'[{"prompt": ' + b"9" * 5000 + b"}]", "bad.jsonl, row 0 (the first is 0)"),
    "half a pair": (rb'{"prompt": "a\ud800"}', r"bad.jsonl:1: a text has half of a surrogate pair, '\ud800'"),
    "the other half": (
        b'{"prompt": "a"}\n' + rb'{"prompt": "\uDFFFa"}',
        r"bad.jsonl:2: a text has half of a surrogate",
    ),
    "half a pair in a list": (rb'[{"prompt": "a\ud800"}]', "bad.jsonl, row 0 (the first is 0): a text has half of a"),
    "half a pair in a field": (rb'{"prompt": "a", "b": [{"c": "\ud83d \ude00"}]}', "bad.jsonl:1: a text has half"),
    "half a pair in a name": (rb'{"prompt": "a", "\ud800": 1}', "bad.jsonl:1: a text has half of a surrogate pair"),
    "half a pair, encoded": (b'{"prompt": "\xed\xa0\x80"}', "bad.jsonl:1: a text has half of a surrogate pair"),
    "nothing": (b"", "is empty (0 bytes)"),
    "an empty list": (b"[]", "has no rows"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
    "only blanks": (b" \n" * 300, "has no rows"),
    "a table of texts": (b"prompt,answer\n1,2\n", "in a format that is not supported"),
    "a torn Arrow file": (b"ARROW1\0\0 and no more", "cannot be read as arrow"),
    "a torn stream": (b"\xff\xff\xff\xff\x10\0\0\0torn", "cannot be read as arrow"),
    "a torn parquet file": (b"PAR1 and no more", "cannot be read as parquet"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named_with_the_line(tmp_path, case) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.jsonl") as caught:
        opened(path).values([0, 1], ["prompt"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_with_whole_surrogate_pairs_are_read(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800 \ud55c"}\n')
    assert opened(tmp_path / "a.jsonl").values([0], ["prompt"])["prompt"] == ["\U0001f600 \\ud800 \ud55c"]


@pytest.mark.parametrize("content", ['{"prompt": "a"}', '[{"prompt": "a"}]'])
def test_rows_may_stand_behind_many_blanks(tmp_path, content) -> None:
    (tmp_path / "a.json").write_text(" \n" * 300 + content + "\n \n")
    assert opened(tmp_path / "a.json").values([0], ["prompt"])["prompt"] == ["a"]


def test_damage_behind_the_first_rows_is_found_with_its_line(tmp_path) -> None:
    lines = [b'{"prompt": "a"}\n'] * 9000
    lines[7000] = b'{"prompt": "a"\n'
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    source = opened(tmp_path / "a.jsonl")
    assert source.values([0, 8999], ["prompt"])["prompt"] == ["a", "a"]
    with pytest.raises(ValueError, match=r"a\.jsonl:7001: no row of JSON .*; mend the row"):
        source.values([7000], ["prompt"])


def test_a_full_cache_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot take a copy of .*a\.jsonl .*; set XDG_CACHE_HOME"):
        opened(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["*.parquet"], ["a.parquet", "b.parquet"]),
        (["b.parquet", "*.parquet"], ["b.parquet", "a.parquet"]),
        (["**/*.parquet"], ["a.parquet", "b.parquet", "sub/c.parquet"]),
        (["sub"], ["sub/c.parquet"]),
        (["odd[1].parquet"], ["odd[1].parquet"]),
    ],
)
def test_paths_name_files_in_order_and_once(tmp_path, paths, names) -> None:
    for name in ("b.parquet", "a.parquet", "sub/c.parquet", "sub/notes.json", "sub/.d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / name)
    if "odd" in paths[0]:
        pq.write_table(pa.table({"prompt": ["odd"]}), tmp_path / paths[0])
    spec = SourceSpec(path=tuple(tmp_path / path for path in paths))
    assert [str(file.path.relative_to(tmp_path)) for file in prompt_files.files_of(spec)] == names


@pytest.mark.parametrize("folder", ["run[1]", "a?", "*", "[ab]", "x[!1]/[0]"])
def test_patterns_in_a_folder_named_like_one(tmp_path, folder) -> None:
    for name in (folder, "run1", "ab", "a", "x2/0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.jsonl").write_text('{"prompt": "a"}\n')
    found = prompt_files.files_of(SourceSpec(path=(tmp_path / folder / "*.jsonl",)))
    assert [file.path for file in found] == [tmp_path / folder / "a.jsonl"]
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist; check the path"):
        opened(tmp_path / folder / "gone.jsonl")


@pytest.mark.parametrize("kind", [TrainSourceSpec, ValSetSpec])
def test_a_folder_with_splits_gives_the_one_that_is_meant(tmp_path, kind) -> None:
    for name in ("train-00000.jsonl", "train_1.jsonl", "test-00000.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    found = [file.path.name for file in prompt_files.files_of(kind(path=tmp_path))]
    assert found == (["train-00000.jsonl", "train_1.jsonl"] if kind is TrainSourceSpec else ["test-00000.jsonl"])
    with pytest.raises(ValueError, match=r"has files of `test` and `train`, and none of `dev`; set `split`"):
        prompt_files.files_of(kind(path=tmp_path, split="dev"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.parquet", r"gone\.parquet does not exist; check the path"),
        ("gone/*.parquet", r"no file matches .*gone/\*\.parquet; check the pattern"),
        ("folder", r"folder is a folder without prompt files .*; name files, or a glob"),
    ],
)
def test_paths_without_files(tmp_path, name, message) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / name)


def test_folders_of_datasets_are_read_where_they_are(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list([{"prompt": f"p{number}"} for number in range(2500)]),
            "test": datasets.Dataset.from_list([{"prompt": "t"}]),
        }
    )
    made.save_to_disk(str(tmp_path / "set"), num_shards={"train": 3, "test": 1})
    source = open_source("set", TrainSourceSpec(path=tmp_path / "set"))
    assert source.values([2499, 0, 1700], ["prompt"])["prompt"] == ["p2499", "p0", "p1700"]
    assert len(open_source("set", ValSetSpec(path=tmp_path / "set"))) == 1
    with pytest.raises(ValueError, match="has no split `validation`; choose from: train, test"):
        open_source("set", TrainSourceSpec(path=tmp_path / "set", split="validation"))


def test_other_files_of_their_names_are_not_those_of_datasets(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "state.json").write_text("[]")
    assert len(opened(tmp_path)) == 1
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json is not JSON .*; save the data set again"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_texts_of_every_arrow_type(tmp_path, kind) -> None:
    texts = pa.array(["a", "b", "a"])
    column = texts.dictionary_encode() if pa.types.is_dictionary(kind) else texts.cast(kind)
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    assert opened(tmp_path / "a.parquet").values([2, 1], ["prompt"])["prompt"] == ["a", "b"]


def test_empty_files_and_groups_between_others_have_no_rows(tmp_path) -> None:
    empty, two = pa.table({"prompt": pa.array([], pa.string())}), pa.table({"prompt": ["a", "b"]})
    with pq.ParquetWriter(tmp_path / "b.parquet", two.schema) as writer:
        for table in (empty, two, empty, two):
            writer.write_table(table)
    for name in ("a", "c"):
        pq.write_table(empty, tmp_path / f"{name}.parquet")
    source = opened(tmp_path)
    assert source.values([3, 0, 2], ["prompt"])["prompt"] == ["b", "a", "a"]
    assert source.place(2).startswith(f"{tmp_path}/b.parquet, row 2 ")


def test_files_may_have_other_columns_and_types(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": 3}\n{"prompt": "b", "answer": "x", "more": [1]}\n')
    pq.write_table(pa.table({"prompt": ["c"]}), tmp_path / "c.parquet")
    source = opened(tmp_path / "a.jsonl", tmp_path / "c.parquet")
    assert source.values([2, 1, 0], ["answer", "more"]) == {"answer": [None, "x", 3], "more": [None, [1], None]}
    assert source.schema.names == ["prompt", "answer", "more"]


def test_groups_of_rows_are_kept_within_their_bound(tmp_path, monkeypatch) -> None:
    pq.write_table(pa.table({"prompt": ["x" * 1000] * 4000}), tmp_path / "a.parquet", row_group_size=100)
    monkeypatch.setattr(source_module, "_KEPT_BYTES", 1 << 20)
    source = opened(tmp_path / "a.parquet")
    for row in range(0, 4000, 50):
        source.values([row], ["prompt"])
    held = sum(table.nbytes for table in source._kept.values())
    assert (1 << 20) - 110_000 < held <= 1 << 20
    assert held == source._kept_bytes


def test_as_many_groups_are_kept_as_fit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parts, "_GROUP_BYTES", 4000)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{number:01000}"}}\n' for number in range(40)))
    source = opened(tmp_path / "a.jsonl")
    assert source.group_rows.tolist() == [4] * 10
    assert source.kept_groups > 10
    size = source.parts[0].size
    monkeypatch.setattr(source_module, "_KEPT_BYTES", size)
    assert source.kept_groups == 5
    monkeypatch.setattr(source_module, "_KEPT_BYTES", 1)
    assert source.kept_groups == 1


def test_a_large_file_with_large_groups_is_read_through_a_copy(tmp_path, monkeypatch, cache) -> None:
    monkeypatch.setattr(parts, "_LARGE_GROUP", 1000)
    monkeypatch.setattr(parts, "_LARGE_FILE", 1000)
    monkeypatch.setattr(parts, "_GROUP_ROWS", 64)
    rows = rows_of(500)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    source = opened(tmp_path / "a.parquet")
    (copy,) = cache.iterdir()
    metadata = pq.ParquetFile(copy).metadata
    assert metadata.row_group(0).num_rows == 64
    assert metadata.num_rows == 500
    assert source.values([499, 3], ["extra_info"])["extra_info"] == [rows[499]["extra_info"], rows[3]["extra_info"]]
    assert source.place(499) == f"{tmp_path}/a.parquet, row 499 (the first is 0)"


def test_columns_of_json_have_the_types_of_their_values(tmp_path) -> None:
    rows = [
        {
            "a": 1,
            "b": 1,
            "c": [],
            "d": {"x": "1"},
            "e": None,
            "f": True,
            "g": [{"role": "user"}],
            "h": 1,
            "i": "2024-01-01",
        },
        {"a": 2, "b": 2.5, "c": ["x"], "d": {"y": [1]}, "e": None, "f": None, "g": [{"content": "x"}], "h": "1"},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    message = pa.struct({"role": pa.string(), "content": pa.string()})
    assert opened(tmp_path / "a.json").schema == pa.schema(
        {
            "a": pa.int64(),
            "b": pa.float64(),
            "c": pa.list_(pa.string()),
            "d": pa.struct({"x": pa.string(), "y": pa.list_(pa.int64())}),
            "e": pa.null(),
            "f": pa.bool_(),
            "g": pa.list_(message),
            "h": pa.string(),
            "i": pa.string(),
        }
    )


def test_a_file_with_a_link_to_it_is_read_once(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(json.dumps(rows_of(1)[0]))
    (folder / "a_link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "twin").symlink_to("data")
    paths = [("data",), ("data/*.jsonl",), ("data", "twin"), ("data/a.jsonl", "data/a_link.jsonl", "data/b.jsonl")]
    for several in paths:
        source = opened(*(tmp_path / path for path in several))
        assert [source.place(row) for row in range(len(source))] == [f"{folder}/a.jsonl:1", f"{folder}/b.jsonl:1"]


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows_of(5000)), path, row_group_size=100)
    source = opened(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        source.values([4999], ["prompt"])
