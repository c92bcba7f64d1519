"""The built model computes what Hugging Face computes, in every layout."""

import pytest
import torch

from dagrl.spec.schema import MegatronEngineSpec, ParallelSpec

MODELS = ("qwen2", "qwen3", "qwen3_tied", "llama", "llama_scaled")
LENGTHS = (11, 1, 40, 7, 23, 2)


def megatron_spec(tensor_parallel: int = 1, sequence_parallel: bool = False, **transformer) -> MegatronEngineSpec:
    parallel = ParallelSpec(tensor_model_parallel_size=tensor_parallel, sequence_parallel=sequence_parallel)
    return MegatronEngineSpec(backend="megatron", group="all", parallel=parallel, transformer=transformer)


def sequences(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def packed(rows: list[torch.Tensor]):
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    longest = max(len(row) for row in rows)
    return torch.cat(rows)[None], PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class StateDict:
    """A weight source out of a Hugging Face model."""

    def __init__(self, model):
        self._tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def names(self):
        return list(self._tensors)

    def get(self, name):
        return self._tensors[name]

    def shape(self, name):
        return tuple(self._tensors[name].shape)


def loaded_chunk(hf_model, spec: MegatronEngineSpec):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from dagrl.engines.megatron.hf_weights import load_hf_weights
    from dagrl.engines.megatron.model import build_model

    parallel_state.initialize_model_parallel(spec.parallel.tensor_model_parallel_size)
    model_parallel_cuda_manual_seed(1)
    chunks = build_model(hf_model.config, spec)
    load_hf_weights(chunks, hf_model.config, StateDict(hf_model))
    return chunks[0]


def logits_of_pack(rank: int, hf_model, spec: MegatronEngineSpec) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    chunk = loaded_chunk(hf_model, spec)
    tokens, params = packed(sequences(hf_model.config.vocab_size))
    with torch.no_grad():
        logits = chunk(tokens, torch.zeros_like(tokens), None, packed_seq_params=params)
        return gather_from_tensor_model_parallel_region(logits)[0, :, : hf_model.config.vocab_size].numpy()


@pytest.mark.parametrize(
    "spec",
    [megatron_spec(), megatron_spec(2), megatron_spec(2, sequence_parallel=True)],
    ids=["tp1", "tp2", "tp2-sequence-parallel"],
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_pack_are_those_of_each_sequence_alone_in_hugging_face(run_ranks, tiny_hf_model, name, spec):
    hf_model = tiny_hf_model(name)
    with torch.no_grad():
        alone = [hf_model(row[None]).logits[0] for row in sequences(hf_model.config.vocab_size)]
    for logits in run_ranks(spec.parallel.tensor_model_parallel_size, logits_of_pack, hf_model, spec):
        torch.testing.assert_close(torch.from_numpy(logits), torch.cat(alone), atol=1e-5, rtol=0)
