"""megatron-bridge converts as the families' tables do, to the bit, in every layout."""

import logging
import sys
import warnings
import zlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.backends.megatron.section import MegatronEngineSpec, ParallelSpec
from dagrl.backends.runtime.initial_weights import RandomWeights
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.weight_sync.exporter import exported

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2-dp2": (4, {"tensor": 2}),
    # More ranks than key heads.
    "tp4": (4, {"tensor": 4}),
    "tp2-pp2-vpp2": (4, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    "ep2-tp2": (2, {"expert": 2, "tensor": 2}),
    "ep2-pp2": (4, {"expert": 2, "pipeline": 2}),
}


class DistinctWeights(RandomWeights):
    """Norms and biases are random too, so that it shows when two of them change places."""

    def get(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(self.shape(name), generator=generator)


class ChangedWeights(DistinctWeights):
    """Some tensors are left out (None), or have another shape, or are there and should not."""

    def __init__(self, config: Any, shapes: dict[str, tuple[int, ...] | None]) -> None:
        super().__init__(config, 0)
        shapes = {**{name: super(ChangedWeights, self).shape(name) for name in super().names()}, **shapes}
        self._own = {name: shape for name, shape in shapes.items() if shape is not None}

    def names(self) -> list[str]:
        return list(self._own)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._own[name]


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "head_dim": 12},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 12},
    "mixtral": {"num_key_value_heads": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def model_of(name: str) -> ModelSpec:
    """Four layers, and a vocabulary of 61 tokens that has to be padded."""
    family, _, variant = name.partition("-")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    fields = {"model_type": family, "vocab_size": 61, "pad_token_id": None, "tie_word_embeddings": variant == "tied"}
    return ModelSpec.model_validate(
        {"init": {**fields, **shape, **MODELS[family]}, "tokenizer": {"kind": "characters", "alphabet": "ab"}}
    )


def spec_of(layout: dict[str, int], **fields: Any) -> MegatronEngineSpec:
    sizes = {f"{name}_model_parallel_size": size for name, size in layout.items()}
    parallel = ParallelSpec(**sizes, sequence_parallel="tensor" in layout)
    own = {"transformer": {"moe_token_dispatcher_type": "alltoall"}}
    return MegatronEngineSpec(backend="megatron", group="all", parallel=parallel, **own, **fields)


@pytest.fixture(scope="module")
def bridge(run_ranks) -> Any:
    """The module under test, with megatron-bridge imported before the ranks are forked."""
    from dagrl.backends.megatron.engine import bridge, bridge_library

    with warnings.catch_warnings():
        # pytest has its own filters in place of those that the package sets.
        warnings.simplefilter("ignore")
        bridge_library.import_bridge()
    return bridge


def join(spec: MegatronEngineSpec) -> None:
    """On a rank: megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(**spec.parallel.model_dump(exclude={"sequence_parallel"}))
    model_parallel_cuda_manual_seed(1)


def unset_chunks(config: Any, spec: MegatronEngineSpec) -> list[Any]:
    """On a rank: the model, with weights that are not a number."""
    from dagrl.backends.megatron.engine.config import transformer_config
    from dagrl.backends.megatron.engine.model import build_model

    chunks = build_model(config, spec, transformer_config(config, spec))
    for chunk in chunks:
        for tensor in _tensors(chunk).values():
            tensor.fill_(float("nan"))
    return chunks


def _tensors(chunk: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in chunk.state_dict().items() if isinstance(value, torch.Tensor)}


CASES = [
    *(("qwen3-tied", layout) for layout in ("one", "tp2", "pp2", "tp2-dp2", "tp2-pp2-vpp2")),
    *((family, layout) for family in ("llama", "qwen2", "qwen3") for layout in ("one", "tp2-pp2-vpp2")),
    *((family, "tp4") for family in ("qwen2", "qwen3")),
    *((family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in ("ep2-tp2", "ep2-pp2", "tp2-pp2-vpp2")),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_are_where_the_native_tables_put_them_and_are_exported_to_the_bit(
    bridge, run_ranks, capfd, name, layout
):
    from dagrl.backends.megatron.engine import hf_weights

    ranks, sizes = LAYOUTS[layout]
    config, spec = load_hf_config(model_of(name)), spec_of(sizes)
    source = DistinctWeights(config, 0)
    source.names()  # Builds Hugging Face's model before the fork.

    def on_rank(rank: int) -> tuple[list[str], list[dict[str, np.ndarray]]]:
        join(spec)
        chunks, native = unset_chunks(config, spec), unset_chunks(config, spec)
        bridge.load_hf_weights(chunks, config, source)
        hf_weights.load_hf_weights(native, config, source)
        pairs = zip(map(_tensors, chunks), map(_tensors, native), strict=True)
        others = [key for own, other in pairs for key in own | other if not torch.equal(own[key], other[key])]
        buckets = exported(bridge.make_exporter(chunks, config, 8000), is_root=rank == 0)
        return others, [{name: tensor.numpy() for name, tensor in bucket} for bucket in buckets]

    answers = run_ranks(ranks, on_rank)
    assert [others for others, _ in answers] == [[]] * ranks
    first, *empty = [buckets for _, buckets in answers]
    found = {name: array for bucket in first for name, array in bucket.items()}
    assert found.keys() == set(source.names())
    assert sum(map(len, first)) == len(found), "each tensor once"
    for name, array in found.items():
        np.testing.assert_array_equal(array, source.get(name).numpy(), err_msg=name)
    assert len(first) > 3
    assert all(buckets == [{}] * len(first) for buckets in empty), "in step, and empty"
    assert capfd.readouterr().out == "", "no progress bars"


def test_buckets_are_filled_up_to_their_size_and_own_their_tensors(bridge, run_ranks):
    config = load_hf_config(model_of("qwen3"))
    limit = 13_000

    def on_rank(rank: int) -> tuple[list[int], list[str]]:
        spec = spec_of({})
        join(spec)
        chunks = unset_chunks(config, spec)
        source = DistinctWeights(config, 0)
        bridge.load_hf_weights(chunks, config, source)
        buckets = list(exported(bridge.make_exporter(chunks, config, limit), is_root=True))
        for tensor in _tensors(chunks[0]).values():
            tensor.zero_()
        tensors = [pair for bucket in buckets for pair in bucket]
        sizes = [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]
        borrowed = [name for name, tensor in tensors if tensor.untyped_storage().nbytes() != tensor.nbytes]
        changed = [name for name, tensor in tensors if not torch.equal(tensor, source.get(name))]
        return sizes, borrowed + changed

    ((sizes, wrong),) = run_ranks(1, on_rank)
    assert wrong == []
    assert max(sizes) <= limit
    assert sum(sizes) / limit > 0.7 * len(sizes)


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"model.norm.weight": None}, "no tensor 'model.norm.weight'"),
        ({"model.layers.3.mlp.up_proj.weight": None}, "no tensor 'model.layers.3.mlp.up_proj.weight'"),
        ({"model.norm.weight": (31,)}, r"'model.norm.weight' is \[31\], but its config says \[32\]"),
        (
            {"model.layers.3.self_attn.k_proj.weight": (48, 32)},
            r"is \[48, 32\], but its config says \[24, 32\]",
        ),
        ({"model.layers.4.mlp.up_proj.weight": (48, 32)}, "hold 1 tensor that a qwen3 of this config does not have"),
    ],
    ids=["missing", "missing-on-the-other-rank", "wrong-shape", "wrong-heads", "unknown"],
)
def test_weights_that_do_not_fit_the_config_are_refused_on_every_rank(bridge, run_ranks, shapes, complaint):
    config, spec = load_hf_config(model_of("qwen3")), spec_of({"pipeline": 2})
    source = ChangedWeights(config, shapes)

    def on_rank(rank: int) -> None:
        join(spec)
        with pytest.raises(ValueError, match=complaint):
            bridge.load_hf_weights(unset_chunks(config, spec), config, source)

    run_ranks(2, on_rank)


def test_layers_that_predict_further_tokens_are_left_out(bridge, run_ranks):
    """As the native tables leave them out."""
    config, spec = load_hf_config(model_of("deepseek_v3")), spec_of({})
    source = ChangedWeights(config, {"model.layers.4.enorm.weight": (32,)})
    config.num_nextn_predict_layers = 1

    def on_rank(rank: int) -> list[str]:
        join(spec)
        chunks = unset_chunks(config, spec)
        bridge.load_hf_weights(chunks, config, source)
        return bridge.make_exporter(chunks, config, 1 << 20).manifest.names

    (found,) = run_ranks(1, on_rank)
    assert {*found, "model.layers.4.enorm.weight"} == set(source.names())


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_the_import_leaves_no_trace_of_the_stand_in_nor_of_its_logging(bridge):
    from megatron.core.utils import get_te_version

    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    assert find_spec("transformer_engine") is None
    assert str(get_te_version()) == "0.0.0", "as megatron says without it"
    believers = [
        name
        for name, module in sys.modules.items()
        if name.startswith("megatron.core.")
        and any(getattr(value, "__name__", None) == "transformer_engine" for value in vars(module).values())
    ]
    assert believers == []
    assert not [handler for handler in logging.getLogger().handlers if type(handler).__module__.startswith("megatron")]
