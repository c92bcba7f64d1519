"""Models take their weights in, by their own loaders first, by a recording then; what is wrong is one sentence.

The models load as SGLang's do: `fused_model`.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from fused_model import EXPERTS, FFN, HEAD_DIM, HIDDEN, VOCABULARY, Model, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dagrl.weight_sync.copy_tracer import _Writes
from dagrl.weight_sync.loader import WeightLoader
from dagrl.weight_sync.manifest import Manifest


def loader_of(model: nn.Module, load: Callable[..., object] | None = None) -> WeightLoader:
    return WeightLoader(lambda: dict(model.named_parameters()), load or model.load_weights)


def buckets_of(tensors: dict[str, Tensor], bucket_bytes: int = 600) -> tuple[Manifest, list[Tensor]]:
    manifest = Manifest.cut(([(name, t.dtype, tuple(t.shape))] for name, t in tensors.items()), bucket_bytes)
    buffers = []
    for layout in manifest.buckets:
        buffers.append(torch.zeros(layout.nbytes, dtype=torch.uint8))
        for name, place in layout.views(buffers[-1]):
            place.copy_(tensors[name])
    return manifest, buffers


def send(loader: WeightLoader, tensors: dict[str, Tensor], bucket_bytes: int = 600) -> WeightLoader:
    """All weights, through two buffers that are used in turns and spoilt after each use."""
    manifest, contents = buckets_of(tensors, bucket_bytes)
    loader.begin(manifest)
    for index, buffer in in_turns(contents):
        loader.load(index, buffer)
    loader.end()
    return loader


def compare(loader: WeightLoader, tensors: dict[str, Tensor], bucket_bytes: int = 600) -> None:
    _, contents = buckets_of(tensors, bucket_bytes)
    loader.begin_comparing()
    for index, buffer in in_turns(contents):
        loader.compare(index, buffer)
    loader.end_comparing()


def in_turns(contents: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    two = [torch.empty(max(map(len, contents)), dtype=torch.uint8) for _ in range(2)]
    for index, content in enumerate(contents):
        buffer = two[index % 2]
        buffer[: len(content)].copy_(content)
        yield index, buffer
        buffer.fill_(0xA5)


def forget(model: Model) -> None:
    """As a server's memory is after a sleep."""
    for tensor in model.parameters():
        tensor.data.fill_(float("nan"))


def assert_loaded(model: Model, tensors: dict[str, Tensor]) -> None:
    alone = Model(model.rank, model.parts, len(model.layers), model.embed.dtype)
    alone.load_weights(tensors.items())
    for (name, found), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, wanted), name


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2]),
    st.integers(1, 4000),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_recorded_copies_do_what_the_loader_does(parts, bucket_bytes, sent, held):
    for rank in range(parts):
        model = Model(rank, parts, dtype=held)
        loader = send(loader_of(model), weights(0, dtype=sent), bucket_bytes)
        assert loader.replays
        assert_loaded(model, weights(0, dtype=sent))
        model.load_weights = None  # type: ignore[assignment]
        for seed in (1, 2):
            forget(model)
            send(loader, weights(seed, dtype=sent), bucket_bytes)
            assert_loaded(model, weights(seed, dtype=sent))


def test_later_syncs_do_not_call_the_loader():
    model, calls = Model(), []
    loader = loader_of(model, lambda given: calls.append(1) or model.load_weights(given))
    send(loader, weights())
    first = len(calls)
    send(loader, weights(1))
    assert first == len(calls) > 1


def test_another_manifest_is_learned_anew():
    model = Model()
    loader = send(loader_of(model), weights(), 600)
    send(loader, weights(1), 2000)
    assert_loaded(model, weights(1))
    assert loader.manifest is not None and len(loader.manifest.buckets) < 10


def test_used_tensors_are_reported_by_name():
    part, every = Model(1, 2), set(weights())
    used = send(loader_of(part), weights() | {"lm_head.weight": torch.zeros(3)}).used
    assert used == every


def test_a_loader_that_computes_is_called_every_time():
    class Doubled(Model):
        def load_weights(self, given):
            super().load_weights((name, tensor * 2 if name.endswith("norm") else tensor) for name, tensor in given)

    model = Doubled()
    loader = loader_of(model)
    for seed in (0, 1):
        forget(model)
        send(loader, weights(seed))
        assert not loader.replays
        assert torch.equal(model.layers[1].norm, weights(seed)["layers.1.norm"] * 2)
    assert loader.used == set(weights())
    compare(loader, weights(1))


def test_a_loader_that_joins_tensors_is_called_every_time():
    class Joined(Model):
        def load_weights(self, given):
            pending = {}
            for name, tensor in given:
                if name.split(".")[-1] in ("q", "k", "v"):
                    pending[name] = tensor
                else:
                    super().load_weights([(name, tensor)])
            for layer in {name.split(".")[1] for name in pending}:
                full = torch.cat([pending[f"layers.{layer}.{what}"] for what in "qkv"])
                self.layers[int(layer)].qkv.data.copy_(full)

    model = Joined()
    loader = loader_of(model)
    for seed in (0, 1):
        send(loader, weights(seed), 10**6)
        assert_loaded(model, weights(seed))
    assert not loader.replays and loader.used == set(weights())


@pytest.mark.parametrize("how", ["fills", "copies", "fills first"])
def test_a_loader_that_writes_over_its_copies_is_called_every_time(how):
    class Overwriting(Model):
        def load_weights(self, given):
            for name, tensor in given:
                if how == "fills first" and name == "layers.0.norm":
                    self.layers[0].norm.data.fill_(7)
                super().load_weights([(name, tensor)])
                if how == "fills" and name == "layers.0.norm":
                    self.layers[0].norm.data[2:4].fill_(7)
                if how == "copies" and name == "layers.1.norm":
                    self.layers[0].norm.data[3:4].copy_(tensor[:1])

    model = Overwriting()
    loader = loader_of(model)
    for seed in (0, 1):
        forget(model)
        send(loader, weights(seed))
        wanted = weights(seed)["layers.0.norm"].clone()
        if how == "fills":
            wanted[2:4] = 7
        if how == "copies":
            wanted[3] = weights(seed)["layers.1.norm"][0]
        assert torch.equal(model.layers[0].norm, wanted)
    assert loader.replays == (how == "fills first")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=6))
@example([(3, 1, 0, True), (0, 1, 0, False)])
@example([(0, 1, 0, True), (2, 2, 0, True), (3, 1, 0, True)])
def test_overwritten_copies_are_detected(writes):
    memory, seen, holds_copy, expected = torch.zeros(6, 4), _Writes(), torch.zeros(6, 4, dtype=torch.bool), False
    for row, rows, column, copied in writes:
        seen.add(memory[row : row + rows, column:], copied=copied)
        there = holds_copy[row : row + rows, column:]
        expected |= bool(there.any())
        there |= copied
    assert seen.overwritten() == expected


def test_derived_weights_prevent_the_replay_of_a_loader():
    class Derived(Model):
        norms = torch.zeros(HIDDEN)

        def load_weights(self, given):
            super().load_weights(given)
            self.norms.copy_(self.layers[0].norm * 2)

    model = Derived()
    loader = loader_of(model)
    for seed in (0, 1):
        send(loader, weights(seed))
        assert torch.equal(model.norms, weights(seed)["layers.0.norm"] * 2)


def test_slices_that_are_made_contiguous_first_are_still_known_by_name():
    class Contiguous(Model):
        def slice(self, tensor, dim):
            return super().slice(tensor, dim).contiguous()

    with torch.inference_mode():
        model = Contiguous(1, 2)
        loader = send(loader_of(model), weights())
        assert loader.used == set(weights()) and not loader.replays
        send(loader, weights(1))
    assert_loaded(model, weights(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_mode_of_the_process_does_not_matter(mode):
    model = Model()
    with mode():
        loader = send(loader_of(model), weights())
        send(loader, weights(1))
        compare(loader, weights(1))
        assert loader.replays
    assert_loaded(model, weights(1))


def test_a_tensor_that_goes_to_two_places_goes_to_both():
    class Tied(Model):
        """Its output layer is tied to the embedding, and in memory of its own."""

        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Parameter(torch.empty(VOCABULARY, HIDDEN), requires_grad=False)

        def load_weights(self, given):
            for name, tensor in given:
                super().load_weights([(name, tensor)])
                if name == "embed.weight":
                    self.lm_head.data.copy_(tensor)

    model = Tied()
    loader = loader_of(model)
    for seed in (0, 1):
        forget(model)
        send(loader, weights(seed), 10**6)
        assert torch.equal(model.lm_head, weights(seed)["embed.weight"])
        assert torch.equal(model.embed[:VOCABULARY], weights(seed)["embed.weight"])
    assert loader.replays


def test_padding_of_experts_is_zero():
    class Padded(Model):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                layer.w2 = torch.nn.Parameter(torch.full((EXPERTS, HIDDEN, FFN + 4), 7.0), requires_grad=False)

        def _load_expert(self, layer, expert, what, tensor):
            if what == "down":
                layer.w2.data[expert].narrow(1, 0, FFN).copy_(tensor)
            else:
                super()._load_expert(layer, expert, what, tensor)

    model = Padded()
    loader = loader_of(model)
    for seed in (0, 1):
        forget(model)
        send(loader, weights(seed))
        compare(loader, weights(seed))
        assert not model.layers[1].w2[:, :, FFN:].any()
        assert torch.equal(model.layers[1].w2[3, :, :FFN], weights(seed)["layers.1.experts.3.down"])


def test_values_that_a_loader_fills_in_are_restored_without_it():
    class Scaled(Model):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(2), requires_grad=False)

        def load_weights(self, given):
            super().load_weights(given)
            self.scale.data.fill_(1)

    model = Scaled()
    loader = loader_of(model)
    for seed in (0, 1):
        forget(model)
        send(loader, weights(seed))
        assert model.scale.tolist() == [1, 1]
    assert loader.replays


# -- what is wrong


def test_a_parameter_that_nothing_is_sent_for_is_named():
    tensors = weights()
    del tensors["layers.1.o"]
    model = Model()
    with pytest.raises(ValueError, match=r"sent no weights .*: layers.1.o \(0 of 128 elements\); use the same"):
        send(loader_of(model), tensors)


def test_a_part_of_a_parameter_that_nothing_is_sent_for_is_seen():
    tensors = weights()
    del tensors["layers.1.experts.2.up"]
    with pytest.raises(ValueError, match=r"sent no weights .*: layers.1.w13 \(672 of 768 elements\)"):
        send(loader_of(Model()), tensors)


def test_a_tensor_of_the_wrong_shape_is_named():
    tensors = weights() | {"layers.1.k": torch.zeros(3 * HEAD_DIM, HIDDEN)}
    with pytest.raises(ValueError, match=r"could not load layers.1.k \[12, 8\]: AssertionError"):
        send(loader_of(Model()), tensors)


def test_a_loaders_error_is_one_line():
    def load(given):
        raise KeyError("norm")

    def load_one(given):
        next(given)
        raise RuntimeError("no buffer\nas a library tells at length")

    with pytest.raises(ValueError, match=r"could not load any tensor: KeyError: 'norm'$"):
        send(loader_of(Model(), load), weights())
    with pytest.raises(ValueError, match=r"could not load embed\.weight \[\d+, 8\]: RuntimeError: no buffer$"):
        send(loader_of(Model(), load_one), weights())


def test_after_a_failure_everything_is_learned_anew():
    model = Model()
    loader = send(loader_of(model), weights())
    tensors = weights() | {"layers.1.k": torch.zeros(3 * HEAD_DIM, HIDDEN)}
    with pytest.raises(ValueError, match=r"layers\.1\.k"):
        send(loader, tensors)
    loader.reset()
    send(loader, weights(1))
    assert_loaded(model, weights(1))


def test_a_loader_that_exchanges_memory_is_refused():
    class Exchanging(Model):
        def load_weights(self, given):
            for name, tensor in given:
                super().load_weights([(name, tensor)])
                if name == "layers.0.norm":
                    self.layers[0].norm.data = tensor

    with pytest.raises(ValueError, match=r"replaces layers\.0\.norm instead of writing"):
        send(loader_of(Exchanging()), weights())


# -- comparing


def test_comparing_changes_nothing_and_finds_nothing_where_all_is_well():
    model = Model(1, 2)
    loader = send(loader_of(model), weights())
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    compare(loader, weights())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("change", [1e-6, float("nan"), float("-inf")])
def test_a_single_changed_element_is_found(change):
    model = Model()
    loader = send(loader_of(model), weights())
    model.layers[1].w2.data[3, 2, 1] += change
    with pytest.raises(ValueError, match=r"weights differ from those sent, in layers.1.w2 \(1 elements\)"):
        compare(loader, weights())


def test_padding_that_changed_is_found():
    model = Model()
    loader = send(loader_of(model), weights())
    model.embed.data[11, 3] = 1.0
    with pytest.raises(ValueError, match=r"in embed \(1 elements\)"):
        compare(loader, weights())


def test_not_a_number_is_the_same_where_it_was_sent():
    tensors = weights() | {"layers.0.norm": torch.full((HIDDEN,), float("nan"))}
    model = Model()
    compare(send(loader_of(model), tensors), tensors)


def test_a_parameter_that_is_not_compared_is_named():
    tensors = weights()
    loader = send(loader_of(Model()), tensors)
    del tensors["layers.0.norm"]
    # As it were if the second round left something out.
    manifest, contents = buckets_of(tensors)
    loader.manifest = manifest
    loader.begin_comparing()
    for index, buffer in in_turns(contents):
        loader.compare(index, buffer)
    with pytest.raises(ValueError, match=r"were not compared entirely: layers.0.norm \(0 of 8 elements\)"):
        loader.end_comparing()
