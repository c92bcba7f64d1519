import pickle
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dagrl.weight_sync.exporter import BucketExporter, IteratedExporter, PackedBucket, packed
from dagrl.weight_sync.manifest import BucketLayout

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def pack(tensors: list[tuple[str, torch.Tensor]]) -> PackedBucket:
    layout = BucketLayout.of((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors)
    data = np.zeros(layout.nbytes, dtype=np.uint8)
    for (_, place), (_, tensor) in zip(layout.views(torch.from_numpy(data)), tensors, strict=True):
        place.copy_(tensor)
    return PackedBucket(layout, data)


def assert_same(left: list[tuple[str, torch.Tensor]], right: list[tuple[str, torch.Tensor]]) -> None:
    described = [[(name, t.dtype, t.shape, bits(t)) for name, t in bucket] for bucket in (left, right)]
    assert described[0] == described[1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3).map(tuple)), min_size=0, max_size=6
    )
)
def test_unpacking_returns_the_packed_values(tensors: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    bucket = [(f"layer.{i}", random_tensor(shape, dtype, i)) for i, (dtype, shape) in enumerate(tensors)]
    assert_same(pack(bucket).unpack(), bucket)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    bucket = [("odd", random_tensor((3,), torch.uint8)), ("weight", random_tensor((4, 5), dtype))]
    assert_same(pack(bucket).unpack(), bucket)


def test_not_a_number_and_infinities_survive() -> None:
    bucket = [("w", torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.bfloat16))]
    assert_same(pack(bucket).unpack(), bucket)


def test_buckets_of_a_trainer_arrive_whole() -> None:
    tensors = [(f"layer.{i}", random_tensor((i, 7), dtype, i)) for i, dtype in enumerate(DTYPES)]
    exporter = IteratedExporter(lambda: iter(tensors), 150, torch.device("cpu"))
    arrived = []
    for index, bucket in packed(exporter, 0):
        assert index == len(arrived)
        # As an object store does.
        arrived.append(pickle.loads(pickle.dumps(bucket)))
    assert len(arrived) > 3
    assert_same([pair for bucket in arrived for pair in bucket.unpack()], tensors)
    assert list(packed(exporter, 1)) == [], "rank 0 owns all"
    again = BucketExporter([*(bucket.unpack() for bucket in arrived), []])
    assert again.manifest == exporter.manifest
    assert_same([pair for _, bucket in packed(again, 0) for pair in copied(bucket)], tensors)


def copied(bucket: PackedBucket) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.clone()) for name, tensor in bucket.unpack()]


def test_unpacking_copies_nothing() -> None:
    bucket = pack([("a", random_tensor((5,), torch.bfloat16)), ("b", random_tensor((7, 3), torch.float32))])
    begin, end = bucket.data.ctypes.data, bucket.data.ctypes.data + bucket.data.nbytes
    for _, tensor in bucket.unpack():
        assert begin <= tensor.data_ptr() < end
        assert tensor.data_ptr() + tensor.nbytes <= end


def test_read_only_memory_is_unpacked_without_a_warning() -> None:
    tensors = [("w", random_tensor((6,), torch.bfloat16))]
    bucket = pack(tensors)
    bucket.data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(bucket.unpack(), tensors)


def test_a_packed_bucket_travels_as_one_buffer() -> None:
    tensors = [("a", random_tensor((5,), torch.bfloat16)), ("b", random_tensor((300, 20), torch.float32))]
    bucket = pack(tensors)
    assert bucket.data.dtype == np.uint8
    assert bucket.data.ndim == 1
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    assert len(message) < 1000
    assert_same(pickle.loads(message, buffers=buffers).unpack(), tensors)
