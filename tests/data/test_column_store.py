"""Columns by the hash of their content."""

import errno
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dagrl.data.batch import Batch, Column
from dagrl.data.column_store import ColumnStore, DamagedColumnError, content_hash

VALUES = arrays.arrays(
    st.sampled_from(["int64", "float32", "uint8", "bool", "int16"]), arrays.array_shapes(max_dims=3, max_side=4)
)


@given(VALUES)
def test_a_column_comes_back_to_the_bit(values: np.ndarray) -> None:
    with TemporaryDirectory() as folder:
        store = ColumnStore(Path(folder))
        for column in (Column(values), Column(values, np.array([0, len(values)])), shared(values)):
            found = store.get(store.put(column))
            assert content_hash(found) == content_hash(column)
            assert found.values.tobytes() == values.tobytes() and found.values.dtype == values.dtype
            assert len(found) == len(column)


def shared(values: np.ndarray) -> Column:
    return Column(values, np.array([0, len(values)]), np.zeros(3, dtype=np.int64))


@given(VALUES, st.data())
def test_one_bit_makes_another_name(values: np.ndarray, data: st.DataObject) -> None:
    changed = values.copy()
    place = data.draw(st.integers(0, values.nbytes - 1))
    changed.view(np.uint8).reshape(-1)[place] ^= 1
    assert content_hash(Column(changed)) != content_hash(Column(values))


def test_shape_and_type_are_part_of_the_name() -> None:
    zeros = np.zeros(4, dtype=np.int64)
    columns = [
        Column(zeros),
        Column(zeros.reshape(2, 2)),
        Column(zeros.view(np.float64)),
        Column(zeros, np.array([0, 4])),
    ]
    assert len({content_hash(column) for column in columns}) == 4


def test_equal_columns_are_one_file(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path / "columns")
    rows = np.arange(3)
    block = store.put_block(Batch(rows, {"a": Column(rows * 1.0), "b": Column(rows * 1.0)}), ("a", "b", "absent"))
    assert block.columns["a"] == block.columns["b"] and block.columns.keys() == {"a", "b"}
    assert len(list((tmp_path / "columns").iterdir())) == 2
    found = store.get_block(block)
    assert found.rows.tolist() == [0, 1, 2] and found["b"].values.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    store = ColumnStore(tmp_path)
    name, other = store.put(Column(np.arange(1000))), store.put(Column(np.arange(7)))
    path = tmp_path / f"{name}.npz"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.write_bytes((tmp_path / f"{other}.npz").read_bytes())
    with pytest.raises(DamagedColumnError, match=name):
        store.get(name)


def test_python_objects_are_neither_stored_nor_loaded(tmp_path: Path) -> None:
    things = np.array([object()], dtype=object)
    with pytest.raises(ValueError, match="cannot be stored"):
        ColumnStore(tmp_path).put(Column(things))
    np.savez(tmp_path / "planted.npz", values=things)
    with pytest.raises(DamagedColumnError):
        ColumnStore(tmp_path).get("planted")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: object, **arrays: object) -> None:
        file.write(b"some")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        ColumnStore(tmp_path).put(Column(np.arange(3)))
    assert list(tmp_path.iterdir()) == []


def test_unneeded_files_are_removed(tmp_path: Path) -> None:
    store = ColumnStore(tmp_path)
    kept, dropped = store.put(Column(np.arange(3))), store.put(Column(np.arange(4)))
    (tmp_path / ".left.123").write_text("of a killed process")
    store.sweep({kept})
    assert [path.stem for path in tmp_path.iterdir()] == [kept] and dropped != kept
