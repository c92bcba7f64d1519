"""Weights go out again and again, through the same buffers; `test_hf_weights` has the layouts."""

from typing import Any

import numpy as np
import pytest
import torch

MIXTURE = (4, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True})


def through_buffers(exporter: Any, rank: int, buffers: list[torch.Tensor]) -> dict[str, np.ndarray]:
    found = {}
    with exporter.exporting():
        for index, layout in enumerate(exporter.manifest.buckets):
            buffer = buffers[index % 2]
            exporter.fill(index, buffer if rank == 0 else None)
            found.update({name: view.numpy().copy() for name, view in layout.views(buffer)} if rank == 0 else {})
            buffer.fill_(0x77)
    return found


@pytest.mark.parametrize(("name", "layout"), [("qwen3_moe_mixed", MIXTURE), ("qwen2", (1, {}))])
def test_each_round_gives_out_what_the_weights_are_then(
    run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, name, layout
):
    hf_model, (ranks, sizes) = hf_model_of(name), layout

    def on_rank(rank: int) -> list[dict[str, np.ndarray]]:
        from dagrl.backends.megatron.engine.export import make_exporter

        chunks = load_chunks(hf_model, megatron_spec(**sizes))
        exporter = make_exporter(chunks, hf_model.config, 30_000)
        assert len(exporter.manifest.buckets) > 3
        buffers = [torch.empty(exporter.manifest.largest, dtype=torch.uint8) for _ in range(2)]
        rounds = []
        for factor in (1.0, 2.0, 2.0):
            with torch.no_grad():
                for parameter in chunks[0].parameters():
                    parameter.mul_(factor)
            rounds.append(through_buffers(exporter, rank, buffers))
        # Other memory, as after a change of the parameters' own.
        for parameter in chunks[0].parameters():
            parameter.data = parameter.data * 2
        return [*rounds, through_buffers(exporter, rank, buffers)]

    rounds = run_ranks(ranks, on_rank)[0]
    wanted = weights_of(hf_model)
    for factor, found in zip((1, 2, 4, 8), rounds, strict=True):
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            np.testing.assert_array_equal(found[key], factor * tensor.numpy(), err_msg=f"{key}, times {factor}")


def test_memory_for_what_is_on_its_way_is_free_between_rounds(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> list[int]:
        from dagrl.backends.megatron.engine.export import make_exporter

        exporter = make_exporter(load_chunks(qwen3, megatron_spec(2, True)), qwen3.config, 8000)
        buffer = torch.empty(exporter.manifest.largest, dtype=torch.uint8)
        sizes = []
        for _ in range(2):
            with exporter.exporting():
                exporter.fill(0, buffer)
                gatherer = exporter._gatherer
                assert gatherer is not None
                rooms = [gatherer._sent.bytes, gatherer._received.bytes]
                sizes.append(sum(room.untyped_storage().nbytes() for room in rooms))
            sizes.append(sum(room.untyped_storage().nbytes() for room in rooms))
        return sizes

    for during, after, again, at_last in run_ranks(2, on_rank):
        assert during == again > 0
        assert after == at_last == 0


def test_tensors_that_generators_join_are_in_one_bucket(run_ranks, load_chunks, megatron_spec, hf_model_of):
    hf_model = hf_model_of("deepseek_v3")

    def on_rank(rank: int) -> list[list[str]]:
        from dagrl.backends.megatron.engine.export import make_exporter

        manifest = make_exporter(load_chunks(hf_model, megatron_spec()), hf_model.config, 1).manifest
        return [[tensor.name for tensor in layout.tensors] for layout in manifest.buckets]

    (buckets,) = run_ranks(1, on_rank)
    latent = [bucket for bucket in buckets if any("q_a_proj" in name for name in bucket)]
    assert len(latent) == 4
    for bucket in latent:
        layer = bucket[0].split(".")[2]
        own = f"model.layers.{layer}.self_attn"
        assert bucket == [f"{own}.q_a_proj.weight", f"{own}.kv_a_proj_with_mqa.weight"]
