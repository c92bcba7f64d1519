from pathlib import Path

import numpy as np
import pytest
import torch

from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config


@pytest.fixture(scope="module")
def workload(benchmark_module):
    return benchmark_module("workload")


def test_a_written_model_is_whole_and_random(workload, tmp_path: Path) -> None:
    folder = workload.write_model(tmp_path / "tiny", workload.MODELS["tiny"])
    model = ModelSpec(path=folder)
    source, expected = weight_source(model, 0), load_hf_config(model)
    assert expected.num_hidden_layers == 2
    matrices = [source.get(name).float() for name in source.names() if len(source.shape(name)) == 2]
    assert len(matrices) == 1 + 7 * 2
    assert all(0.018 < float(matrix.std()) < 0.022 for matrix in matrices)
    first_rows = {tuple(matrix[0, :8].tolist()) for matrix in matrices}
    assert len(first_rows) == len(matrices), "no two matrices are the same"


def test_a_stream_shorter_than_a_matrix_is_repeated_where_it_ended(workload) -> None:
    stream = torch.arange(7)
    cut, taken = workload._cut(stream, (2, 5), 3)
    assert cut.tolist() == [[3, 4, 5, 6, 0], [1, 2, 3, 4, 5]] and taken == 13
    assert workload._cut(stream, (1, 3), taken)[0].tolist() == [[6, 0, 1]]


def test_all_tokens_but_each_rows_first_are_the_response(workload) -> None:
    work = workload.Workload(row_tokens=16, rows_per_micro_batch=2, micro_batches=3)
    batch = work.batch(vocab_size=50, replica=1)
    assert work.tokens == 96 == batch["prompt_tokens"].lengths.sum() + batch["response_tokens"].lengths.sum()
    joined = [np.concatenate([batch["prompt_tokens"][i], batch["response_tokens"][i]]) for i in range(len(batch))]
    np.testing.assert_array_equal(joined, work.token_ids(50, 1))
    assert not np.array_equal(work.token_ids(50, 0), work.token_ids(50, 1))
