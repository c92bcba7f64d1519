"""Weights go out again and again, through the same buffers; `test_hf_weights` has the layouts."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config.fp8_weights import Fp8Weights
from dagrl.weight_sync.adapter_loader import AdapterLoader, Place
from dagrl.weight_sync.fp8 import Fp8Exporter, quantise
from dagrl.weight_sync.receiver import Route, WeightReceiver
from dagrl.weight_sync.sender import WeightSender

MIXTURE = (4, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True})
OWNERS: dict[str, tuple[str, int, dict[str, Any], set[int]]] = {
    "pp2-vpp2": ("qwen3_tied", 2, {"pp": 2, "vpp": 2}, {0, 1}),
    "pp2-dp2": ("qwen2", 4, {"pp": 2}, {0, 2}),
    "ep2-dp2": ("deepseek_v3", 4, {"ep": 2}, {0, 1}),
    "tp2-ep2-etp2": ("qwen3_moe_mixed", 4, {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {0, 2}),
    "tp2-ep2-pp2": ("deepseek_v3", 4, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True}, {0, 1, 2, 3}),
    "pp2-vpp2-ep2": ("mixtral", 4, {"pp": 2, "vpp": 2, "ep": 2}, {0, 1, 2, 3}),
}
"""Name -> model, ranks, layout, and the ranks that own buckets."""


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def through_buffers(exporter: Any, rank: int, buffers: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """The tensors of the buckets that the rank owns."""
    found = {}
    with exporter.exporting():
        for index, layout in enumerate(exporter.manifest.buckets):
            buffer = buffers[index % 2]
            # A transport may pass a buffer on other ranks too.
            exporter.fill(index, buffer)
            own = layout.views(buffer) if layout.owner == rank else []
            found.update({name: view.numpy().copy() for name, view in own})
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
        buffers = [torch.empty(exporter.manifest.buffer_sizes(1)[0], dtype=torch.uint8) for _ in range(2)]
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


@pytest.mark.parametrize("case", OWNERS)
def test_owners_export_their_own_parts_of_the_model(
    run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of, case
):
    name, ranks, sizes, owners = OWNERS[case]
    hf_model = hf_model_of(name)

    def on_rank(rank: int) -> Any:
        from dagrl.backends.megatron.engine.export import make_exporter

        chunks = load_chunks(hf_model, megatron_spec(**sizes))
        exporter = make_exporter(chunks, hf_model.config, 30_000, by_owner=True)
        buffers = [torch.empty(exporter.manifest.buffer_sizes(1)[0], dtype=torch.uint8) for _ in range(2)]
        return exporter.manifest, *(through_buffers(exporter, rank, buffers) for _ in range(2))

    manifests, *rounds = zip(*run_ranks(ranks, on_rank), strict=True)
    assert all(manifest == manifests[0] for manifest in manifests)
    assert {bucket.owner for bucket in manifests[0].buckets} == owners
    wanted = weights_of(hf_model)
    assert sorted(manifests[0].names) == sorted(wanted), "each tensor once"
    for answers in rounds:
        found = {key: tensor for answer in answers for key, tensor in answer.items()}
        assert sum(map(len, answers)) == len(found) == len(wanted)
        for key, tensor in wanted.items():
            np.testing.assert_array_equal(found[key], tensor.numpy(), err_msg=key)


def test_memory_for_what_is_on_its_way_is_free_between_rounds(run_ranks, load_chunks, megatron_spec, qwen3):
    def on_rank(rank: int) -> list[int]:
        from dagrl.backends.megatron.engine.export import make_exporter

        exporter = make_exporter(load_chunks(qwen3, megatron_spec(2, True)), qwen3.config, 8000)
        buffer = torch.empty(exporter.manifest.buffer_sizes(1)[0], dtype=torch.uint8)
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


class Kept:
    """Keeps whatever tensors are sent."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors.update(tensors)

    def places(self, shapes: object) -> Mapping[str, list[Place]]:
        raise LookupError("there are none")

    def are_placed(self) -> bool:
        return True


def test_a_server_receives_what_quantising_the_whole_model_gives(
    run_ranks, load_chunks, megatron_spec, hf_model_of, weights_of
):
    hf_model, (ranks, sizes) = hf_model_of("qwen3_moe_mixed"), MIXTURE

    def on_rank(rank: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        from dagrl.backends.megatron.engine.export import make_exporter

        chunks = load_chunks(hf_model, megatron_spec(**sizes))
        by_owner = Fp8Exporter(make_exporter(chunks, hf_model.config, 30_000, by_owner=True), Fp8Weights("block"))
        buffer, own = torch.empty(by_owner.manifest.buffer_sizes(1)[0], dtype=torch.uint8), dict[str, np.ndarray]()
        with by_owner.exporting():
            for index, layout in enumerate(by_owner.manifest.buckets):
                # A transport may pass a buffer on other ranks too.
                by_owner.fill(index, buffer)
                views = layout.views(buffer) if layout.owner == rank else []
                own |= {name: bits(view).copy() for name, view in views}
        exporter = Fp8Exporter(make_exporter(chunks, hf_model.config, 30_000), Fp8Weights("block"))
        with closing(WeightSender(exporter, "broadcast", host="127.0.0.1", timeout_s=60.0)) as sender:
            offer, received = sender.offer(), dict[str, torch.Tensor]()
            if offer is None:
                sender.send(1, [0])
                return own, {}
            receiver = WeightReceiver(AdapterLoader(Kept(received)), torch.device("cpu"), "a server")
            route = Route(1, {"": offer.address}, 60.0)
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(receiver.receive, route)
                sender.send(1, [1])
                done.result(60.0)
            return own, {name: bits(tensor) for name, tensor in received.items()}

    results = run_ranks(ranks, on_rank)
    owned, wanted = [own for own, _ in results], dict[str, np.ndarray]()
    assert sum(map(bool, owned)) > 1, "several ranks own buckets"
    weights = weights_of(hf_model)
    chosen = Fp8Weights("block").choose((name, tuple(tensor.shape)) for name, tensor in weights.items())
    assert any(".experts." in name for name in chosen) and any("q_proj" in name for name in chosen)
    for name, tensor in weights.items():
        values, scales = quantise(tensor, "block") if name in chosen else (tensor, None)
        wanted |= {name: bits(values)} | ({f"{name}_scale_inv": bits(scales)} if scales is not None else {})
    for found in (results[0][1], {name: each for own in owned for name, each in own.items()}):
        assert found.keys() == wanted.keys()
        for name, expected in wanted.items():
            np.testing.assert_array_equal(found[name], expected, err_msg=name)
