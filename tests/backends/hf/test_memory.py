"""Memory of Hugging Face models inside a worker."""

from __future__ import annotations

from published_shapes import QWEN3_1B7

from dagrl.backends.hf.memory import generator_memory
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.planning.planned_engine import Workload


def test_a_generator_has_the_cache_of_a_batch() -> None:
    spec, work = HfEngineSpec(backend="hf", group="gpu", max_batch_size=16), Workload(longest=1000)
    found = generator_memory(QWEN3_1B7, spec, work, on_gpu=True)
    assert found.awake["cache"] == 16 * 1000 * 2 * 8 * 128 * 28 * 2
    assert generator_memory(QWEN3_1B7, spec, work, on_gpu=False).awake["weights"] == 4 * QWEN3_1B7.parameters
