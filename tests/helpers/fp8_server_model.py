"""Updates a server's own model with weights in fp8, twice, and compares its memory with what was sent.

    python tests/helpers/fp8_server_model.py sglang

The models have the server's classes and its quantization config, without kernels, which need a GPU: SGLang's as on each
of two tensor-parallel ranks, vLLM's whole. A mixture has a scale for each block, a dense model one for each channel.
Runs in a process for itself, as both libraries keep global state.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dagrl.backends.runtime.initial_weights import published_shapes
from dagrl.backends.serving.model_folder import model_folder
from dagrl.config.fp8_weights import Fp8Weights, Granularity
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.weight_sync.exporter import IteratedExporter
from dagrl.weight_sync.fp8 import Fp8Exporter, quantise
from dagrl.weight_sync.loader import WeightLoader

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
KEPT = ("model.layers.2.self_attn",)
"""Modules that are not quantised."""


def model_of(granularity: Granularity, dense_layers: list[int]) -> ModelSpec:
    """A small mixture with these layers without experts, or a small dense model."""
    mixture = {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": dense_layers}
    init = SIZES | (mixture if granularity == "block" else {"model_type": "qwen3"})
    return ModelSpec.model_validate({"init": init, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


Models = Iterator[tuple[nn.Module, WeightLoader, int, int]]
"""A rank's model and its loader, with the rank and the number of ranks."""


def check(spec: ModelSpec, fp8: Fp8Weights, models: Models) -> None:
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in published_shapes(load_hf_config(spec)).items()}
    plain = IteratedExporter(lambda: iter(tensors.items()), 300_000, torch.device("cpu"))
    exporter = Fp8Exporter(plain, fp8)
    buffer = torch.empty(exporter.manifest.buffer_sizes(1)[0], dtype=torch.uint8)
    for model, loader, rank, ranks in models:
        before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.named_parameters()}
        for sync in range(2):
            for tensor in tensors.values():
                tensor.mul_(1.5)
            assert loader.replays == (sync > 0), "the second update repeats the copies of the first"
            loader.begin(exporter.manifest)
            with exporter.exporting():
                for index in range(len(exporter.manifest.buckets)):
                    exporter.fill(index, buffer)
                    loader.load(index, buffer)
            loader.end()
            held = dict(model.named_parameters())
            assert all(held[name] is tensor and tensor.data_ptr() == at for name, (tensor, at) in before.items())
            compare(held, tensors, fp8, rank, ranks)
        # All is sent again, and compared by the model's own loader.
        loader.begin_comparing()
        with exporter.exporting():
            for index in range(len(exporter.manifest.buckets)):
                exporter.fill(index, buffer)
                loader.compare(index, buffer)
        loader.end_comparing()
        print(f"rank {rank} of {ranks} has the weights with a scale for each {fp8.granularity}")


def compare(held: dict[str, nn.Parameter], tensors: dict[str, Tensor], fp8: Fp8Weights, rank: int, ranks: int) -> None:
    def part(tensor: Tensor, dim: int) -> Tensor:
        # The scales of channels are whole where columns are divided.
        return tensor if tensor.shape[dim] == 1 else tensor.chunk(ranks, dim)[rank]

    def same(name: str, dim: int, sources: list[list[str]], *, in_fp8: bool = True) -> None:
        """`sources` are the matrices joined along rows, for each expert."""
        weights = [[tensors[f"model.layers.{source}.weight"] for source in joined] for joined in sources]
        found, suffix = held[f"model.layers.{name}"], fp8.scale_suffix
        if not in_fp8:
            wanted = torch.stack([torch.cat([part(each, dim) for each in joined]) for joined in weights])
            assert torch.equal(found, wanted.to(found.dtype).reshape(found.shape)), name
            return
        both = [[quantise(each, fp8.granularity) for each in joined] for joined in weights]
        values, scales = (
            torch.stack([torch.cat([part(each[which].view(bits), dim) for each in joined]) for joined in both])
            for which, bits in ((0, torch.uint8), (1, torch.float32))
        )
        if fp8.granularity == "channel":
            assert found.stride() == (1, found.shape[0]), "it was processed after loading"
            found = found.t()
        assert torch.equal(found.view(torch.uint8), values.reshape(found.shape)), name
        found = held[f"model.layers.{name}{suffix}"]
        assert torch.equal(found, scales.reshape(found.shape)), name

    for layer in range(3):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        same(f"{attention}.qkv_proj.weight", 0, [[f"{attention}.{each}_proj" for each in "qkv"]], in_fp8=layer != 2)
        same(f"{attention}.o_proj.weight", 1, [[f"{attention}.o_proj"]], in_fp8=layer != 2)
        if f"model.layers.{mlp}.gate.weight" not in tensors:
            same(f"{mlp}.gate_up_proj.weight", 0, [[f"{mlp}.gate_proj", f"{mlp}.up_proj"]])
            same(f"{mlp}.down_proj.weight", 1, [[f"{mlp}.down_proj"]])
            continue
        router = held[f"model.layers.{mlp}.gate.weight"]
        assert torch.equal(router, tensors[f"model.layers.{mlp}.gate.weight"].to(router.dtype))
        experts = next(name for name in held if name.startswith(f"model.layers.{mlp}.experts.") and "w13" in name)
        where = experts.removeprefix("model.layers.").rpartition(".")[0]
        each = [f"{mlp}.experts.{expert}" for expert in range(4)]
        same(f"{where}.w13_weight", 0, [[f"{expert}.gate_proj", f"{expert}.up_proj"] for expert in each])
        same(f"{where}.w2_weight", 1, [[f"{expert}.down_proj"] for expert in each])


def sglang_models(folder: str) -> Models:
    from dagrl.backends.sglang.fp8 import load_weights, sent_parameters
    from dagrl.backends.sglang.plugin import prepare_cpu

    prepare_cpu()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.quantization import get_quantization_config
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from transformers import AutoConfig

    arguments = {"device": "cpu", "skip_tokenizer_init": True, "attention_backend": "torch_native"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=folder, sampling_backend="pytorch", **arguments))
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=f"file://{folder}/rendezvous", local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel()
    config = AutoConfig.from_pretrained(folder)
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    written = config.quantization_config | {
        "packed_modules_mapping": getattr(model_class, "packed_modules_mapping", {})
    }
    quantisation = get_quantization_config(written["quant_method"]).from_config(written)
    # It asks the GPU.
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    for rank in range(2):
        sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "moe_ep_size": 1, "attn_dp_size": 1}
        ranks = {"tp_rank": rank, "attn_tp_rank": rank, "moe_tp_rank": rank, "moe_ep_rank": 0, "attn_dp_rank": 0}
        with get_parallel().override(**sizes, **ranks):
            model = model_class(config, quant_config=quantisation)
            for module in model.modules():
                if hasattr(module, "scheme"):
                    module.quant_method.process_weights_after_loading(module)
            yield model, WeightLoader(partial(sent_parameters, model), partial(load_weights, model)), rank, 2


def vllm_models(folder: str) -> Models:
    os.environ |= {"VLLM_USE_DEEP_GEMM": "0", "TORCHDYNAMO_DISABLE": "1"}
    from dagrl.backends.vllm.fp8 import keep_cache_scales, load_weights
    from dagrl.backends.vllm.versions import prepare_cpu

    prepare_cpu()
    keep_cache_scales()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

    # The processing of the kernels for GPUs, without the kernels.
    parts: dict[str, Any] = {"apply_block_scaled_mm": None, "is_supported": None}
    kernel = object.__new__(type("Kernel", (Fp8BlockScaledMMLinearKernel,), parts))
    fp8.init_fp8_linear_kernel = lambda **_: kernel
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, object)
    fp8.make_fp8_moe_kernel = lambda **_: None
    fp8.make_fp8_moe_quant_config = lambda **_: SimpleNamespace()
    by_channel: Any = object.__new__(CutlassFP8ScaledMMLinearKernel)
    by_channel.layer_param_names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    compressed_tensors_w8a8_fp8.init_fp8_linear_kernel = lambda **_: by_channel
    compressed_tensors_w8a8_fp8.expose_input_quant_key = lambda *_: None
    arguments = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(model=folder, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            initialize_model_parallel(1, 1)
        model = initialize_model(config)
        initialize_dummy_weights(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    scales = [
        float(getattr(layer, name))
        for layer in model.modules()
        for name in ("_k_scale", "_v_scale")
        if hasattr(layer, name)
    ]
    assert scales == [1.0] * 6, f"the cache's scales are {scales}"
    yield model, WeightLoader(lambda: dict(model.named_parameters()), partial(load_weights, model)), 0, 1


if __name__ == "__main__":
    # SGLang has experts in each layer, whatever the config says.
    dense, models = {"sglang": ([], sglang_models), "vllm": ([0], vllm_models)}[sys.argv[1]]
    for chosen in (Fp8Weights("block", KEPT), Fp8Weights("channel", KEPT)):
        with tempfile.TemporaryDirectory() as scratch:
            small = model_of(chosen.granularity, dense)
            folder = model_folder(small, Path(scratch), seed=0, with_weights=False, fp8=chosen)
            check(small, chosen, models(str(folder)))
