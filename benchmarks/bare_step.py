"""The train step that dagrl's engine is measured against: Megatron-core alone, as a user of it would write it.

Megatron's GPTModel, DistributedDataParallel, distributed optimizer, schedule and fused cross-entropy. From dagrl come
only the reading of the start weights and, without a GPU, the modules that stand in for Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from workload import Workload

from dagrl.backends.megatron.engine.hf_weights import load_hf_weights
from dagrl.backends.megatron.section import padded_vocab_size
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config


class BareStep:
    """Model, optimizer and data of one rank. Megatron's parallel state must be initialised, without pipeline stages."""

    def __init__(self, folder: Path, workload: Workload, transformer: Mapping[str, Any] | None = None) -> None:
        """`transformer`: fields of Megatron's config instead of those that stand below."""
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        hf_config = load_hf_config(ModelSpec(path=folder))
        config = _transformer_config(hf_config, transformer or {})
        model = _model(config, hf_config)
        load_hf_weights([model], hf_config, weight_source(ModelSpec(path=folder), 0))
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        config.finalize_model_grads_func = finalize_model_grads
        self.model = DistributedDataParallel(config, ddp, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-6,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
                clip_grad=1.0,
            ),
            [self.model],
        )
        replica = parallel_state.get_data_parallel_rank()
        self._micro_batches = _micro_batches(workload, hf_config.vocab_size, replica)
        self._workload = workload

    def __call__(self) -> float:
        """One optimizer step; the mean negative log-prob of the replica's tokens before it."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        nll = self._all_micro_batches(forward_only=False)
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        return nll

    def logprobs(self) -> float:
        """The log-probs of all tokens; their negative mean."""
        with torch.no_grad():
            return self._all_micro_batches(forward_only=True)

    def _all_micro_batches(self, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        sums = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(self._micro_batches)],
            model=[self.model],
            num_microbatches=len(self._micro_batches),
            seq_length=self._workload.tokens_per_micro_batch,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        nll, tokens = torch.stack([part["nll"] for part in sums]).sum(0).tolist()
        return nll / tokens


def _transformer_config(hf_config: Any, chosen: Mapping[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": on_gpu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": tensor_parallel,
        "sequence_parallel": tensor_parallel > 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "apply_rope_fusion": on_gpu,
        "bias_activation_fusion": on_gpu,
        "cross_entropy_loss_fusion": on_gpu,
        "cross_entropy_fusion_impl": "native",
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": True,
        "perform_initialization": False,
    }
    if hasattr(hf_config, "num_experts"):
        fields |= {
            "num_moe_experts": hf_config.num_experts,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": on_gpu,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(**{**fields, **chosen})


def _model(config: Any, hf_config: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from dagrl.backends.megatron.engine.cpu.modules import use_plain_modules

    if not torch.cuda.is_available():
        use_plain_modules()
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=True),
        vocab_size=padded_vocab_size(hf_config.vocab_size, tensor_parallel),
        max_sequence_length=hf_config.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
    ).to("cuda" if torch.cuda.is_available() else "cpu")


def _micro_batches(workload: Workload, vocab_size: int, replica: int) -> list[dict[str, Any]]:
    """Everything a forward pass takes, on the device."""
    from megatron.core.packed_seq_params import PackedSeqParams

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.from_numpy(workload.token_ids(vocab_size, replica)).to(device)
    bounds = torch.arange(workload.rows_per_micro_batch + 1, dtype=torch.int32, device=device) * workload.row_tokens
    longest = workload.row_tokens
    sequences = PackedSeqParams("thd", bounds, bounds, bounds, bounds, longest, longest)
    positions = torch.arange(longest, device=device).repeat(workload.rows_per_micro_batch)[None]
    labels = ids.roll(-1, 1)
    has_label = torch.ones(ids.shape, device=device)
    has_label[:, -1] = 0
    return [
        {
            "input_ids": ids[rows].reshape(1, -1),
            "position_ids": positions,
            "labels": labels[rows].reshape(1, -1),
            "mask": has_label[rows].reshape(1, -1),
            "sequences": sequences,
        }
        for rows in torch.arange(workload.rows, device=device).split(workload.rows_per_micro_batch)
    ]


def _forward(waiting: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    micro_batch = next(waiting)
    losses = model(
        input_ids=micro_batch["input_ids"],
        position_ids=micro_batch["position_ids"],
        attention_mask=None,
        labels=micro_batch["labels"],
        packed_seq_params=micro_batch["sequences"],
    )
    return losses, partial(_masked_sum, mask=micro_batch["mask"])


def _masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = (losses.float() * mask).sum()
    return total, mask.sum().int(), {"nll": torch.stack([total.detach(), mask.sum()])}
