import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagrl.data.batch import Batch, Column
from dagrl.data.experience import Experience, Origin, origin_of, read_experience, write_experience

ORIGIN = Origin(model="m", tokenizer="t", explorer="1of1", step=3, group_size=2)


def written(path, rows=(4, 5, 8, 9)):
    columns = {
        "sample_id": Column(np.array(rows)),
        "group_id": Column(np.array(rows) // 2),
        "response_tokens": Column.ragged([[1, 2], [], [3], [4, 5, 6]], "int64"),
        "rollout_logprob": Column.ragged([[-0.5, -1.5], [], [-2], [0, -1, -3]], "float32"),
        "answer": Column.text(["7", "", "ü", "8"]),
        "routed_experts": Column.ragged([np.ones((2, 3, 2)), np.zeros((0, 3, 2)), np.ones((1, 3, 2))] * 1
                                        + [np.full((3, 3, 2), 2)], "int16"),
        "reward": Column(np.array([0, 1, np.nan, 0.5], dtype=np.float32)),
    }  # fmt: skip
    experience = Experience(Batch(np.array(rows), columns), np.array([70, 70, 1 << 40, 1 << 40]))
    write_experience(path, experience, ORIGIN)
    return experience


def test_a_batch_comes_back_bit_for_bit(tmp_path):
    path = tmp_path / "batches" / "1of1-000003.parquet"
    batch = written(path)
    origin, names = origin_of(path)
    assert origin == ORIGIN
    assert names == {*batch.batch.columns, "prompt_id"}
    found = read_experience(path, batch.batch.columns)
    assert found.prompt_ids.tolist() == batch.prompt_ids.tolist()
    assert found.batch.rows.tolist() == batch.batch.rows.tolist()
    for name, column in batch.batch.columns.items():
        other = found.batch[name]
        assert other.values.dtype == column.values.dtype, name
        np.testing.assert_array_equal(other.values, column.values)
        assert (other.offsets is None) == (column.offsets is None)
        np.testing.assert_array_equal(other.lengths, column.lengths)
    assert [*tmp_path.rglob("*.parquet")] == [path], "nothing is left beside it"


def test_only_some_columns_are_read(tmp_path):
    written(path := tmp_path / "a-1.parquet")
    assert read_experience(path, ["reward"]).batch.columns.keys() == {"sample_id", "reward"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("torn", "cannot be read"),
        ("other", "no file of experience"),
        ("newer", "format 9"),
        ("empty", "cannot be read"),
    ],
)
def test_a_file_that_is_not_experience_is_one_sentence(tmp_path, content, words):
    path = tmp_path / "1of1-000001.parquet"
    if content == "torn":
        written(path)
        path.write_bytes(path.read_bytes()[:-100])
    elif content == "empty":
        path.touch()
    else:
        table = pa.table({"reward": [1.0]})
        fields = {b"dagrl.experience": json.dumps({"format": 9})} if content == "newer" else {}
        pq.write_table(table.replace_schema_metadata(fields), path)
    with pytest.raises(ValueError, match=words) as caught:
        origin_of(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
