"""Updates a server's own model with weights in fp8, twice, and compares its memory with what was sent.

    python tests/helpers/fp8_server_model.py sglang

The model has the server's classes and Fp8Config, without kernels, which need a GPU: SGLang's as on each of two
tensor-parallel ranks, vLLM's whole and processed after loading. Runs in a process for itself, as both libraries keep
global state.
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

from dagrl.backends.model_source import load_hf_config, published_shapes
from dagrl.backends.serving.model_folder import model_folder
from dagrl.config.block_fp8 import BlockFp8
from dagrl.config.schema import ModelSpec
from dagrl.weight_sync.exporter import IteratedExporter
from dagrl.weight_sync.fp8 import Fp8Exporter, quantise
from dagrl.weight_sync.loader import WeightLoader


def model_of(dense_layers: list[int]) -> ModelSpec:
    """A small mixture with these layers without experts."""
    return ModelSpec.model_validate(
        {
            "init": {
                "model_type": "qwen3_moe",
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "vocab_size": 128,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 256,
                "norm_topk_prob": True,
                "mlp_only_layers": dense_layers,
            },
            "tokenizer": {"kind": "characters", "alphabet": "ab"},
        }
    )


FP8 = BlockFp8(("model.layers.2.self_attn",))
Models = Iterator[tuple[nn.Module, WeightLoader, int, int]]
"""A rank's model and its loader, with the rank and the number of ranks."""


def check(spec: ModelSpec, models: Models) -> None:
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in published_shapes(load_hf_config(spec)).items()}
    plain = IteratedExporter(lambda: iter(tensors.items()), 300_000, torch.device("cpu"))
    exporter = Fp8Exporter(plain, FP8)
    buffer = torch.empty(exporter.manifest.largest, dtype=torch.uint8)
    for model, loader, rank, ranks in models:
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
            compare(dict(model.named_parameters()), tensors, rank, ranks)
        print(f"rank {rank} of {ranks} has the weights")


def compare(held: dict[str, nn.Parameter], tensors: dict[str, Tensor], rank: int, ranks: int) -> None:
    def part(name: str, dim: int) -> Tensor:
        return tensors[f"model.layers.{name}.weight"].chunk(ranks, dim)[rank]

    def same(name: str, wanted: Tensor, *, in_fp8: bool = True) -> None:
        found = held[f"model.layers.{name}"]
        if not in_fp8:
            assert torch.equal(found, wanted.to(found.dtype)), name
            return
        values, scales = quantise(wanted)
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(held[f"model.layers.{name}_scale_inv"], scales), name

    for layer in range(3):
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        joined = torch.cat([part(f"{attention}.{each}_proj", 0) for each in "qkv"])
        same(f"{attention}.qkv_proj.weight", joined, in_fp8=layer != 2)
        same(f"{attention}.o_proj.weight", part(f"{attention}.o_proj", 1), in_fp8=layer != 2)
        if f"model.layers.{mlp}.gate.weight" not in tensors:
            same(f"{mlp}.gate_up_proj.weight", torch.cat([part(f"{mlp}.{each}_proj", 0) for each in ("gate", "up")]))
            same(f"{mlp}.down_proj.weight", part(f"{mlp}.down_proj", 1))
            continue
        same(f"{mlp}.gate.weight", tensors[f"model.layers.{mlp}.gate.weight"], in_fp8=False)
        experts = next(name for name in held if name.startswith(f"model.layers.{mlp}.experts.") and "w13" in name)
        where = experts.removeprefix("model.layers.").rpartition(".")[0]
        each = [f"{mlp}.experts.{expert}" for expert in range(4)]
        pairs = [torch.cat([part(f"{e}.{name}_proj", 0) for name in ("gate", "up")]) for e in each]
        same(f"{where}.w13_weight", torch.stack(pairs))
        same(f"{where}.w2_weight", torch.stack([part(f"{e}.down_proj", 1) for e in each]))


def sglang_models(folder: str) -> Models:
    from dagrl.backends.sglang.fp8 import load_weights, sent_parameters
    from dagrl.backends.sglang.plugin import prepare_cpu

    prepare_cpu()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from transformers import AutoConfig

    arguments = {"device": "cpu", "skip_tokenizer_init": True, "attention_backend": "torch_native"}
    set_global_server_args_for_scheduler(ServerArgs(model_path=folder, sampling_backend="pytorch", **arguments))
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=f"file://{folder}/rendezvous", local_rank=0, backend="gloo"
    )
    parallel_state.initialize_model_parallel()
    config = AutoConfig.from_pretrained(folder)
    for rank in range(2):
        sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "moe_ep_size": 1, "attn_dp_size": 1}
        ranks = {"tp_rank": rank, "attn_tp_rank": rank, "moe_tp_rank": rank, "moe_ep_rank": 0, "attn_dp_rank": 0}
        with get_parallel().override(**sizes, **ranks):
            model = Qwen3MoeForCausalLM(config, quant_config=Fp8Config.from_config(config.quantization_config))
            yield model, WeightLoader(partial(sent_parameters, model), partial(load_weights, model)), rank, 2


def vllm_models(folder: str) -> Models:
    os.environ |= {"VLLM_USE_DEEP_GEMM": "0", "TORCHDYNAMO_DISABLE": "1"}
    from dagrl.backends.vllm import cpu
    from dagrl.backends.vllm.fp8 import load_weights

    cpu.prepare()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    # The processing of the kernels for GPUs, without the kernels.
    parts: dict[str, Any] = {"apply_block_scaled_mm": None, "is_supported": None}
    kernel = object.__new__(type("Kernel", (Fp8BlockScaledMMLinearKernel,), parts))
    fp8.init_fp8_linear_kernel = lambda **_: kernel
    fp8.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.TRITON, object)
    fp8.make_fp8_moe_kernel = lambda **_: None
    fp8.make_fp8_moe_quant_config = lambda **_: SimpleNamespace()
    arguments = {"load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(model=folder, **arguments).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = initialize_model(config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    yield model, WeightLoader(lambda: dict(model.named_parameters()), partial(load_weights, model)), 0, 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        # SGLang has experts in each layer, whatever the config says.
        dense, models = {"sglang": ([], sglang_models), "vllm": ([0], vllm_models)}[sys.argv[1]]
        small = model_of(dense)
        folder = model_folder(small, Path(scratch), seed=0, with_weights=False, fp8=FP8)
        check(small, models(str(folder)))
