"""A sampler for SGLang that draws tokens and their log-probs in one pass over the vocabulary.

Only for requests without restrictions of sampling; SGLang's own sampler handles the others. For SGLang 0.5.17.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB, Sampler, register_sampler_backend

from dagrl.backends.sglang.sampling_kernel import sample

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs


def use_fused_sampler(server_args: ServerArgs) -> None:
    """Make the model of this process sample with `FusedSampler`, under the name of the backend that handles other
    batches.
    """
    register_sampler_backend(server_args.sampling_backend, FusedSampler)


class FusedSampler(Sampler):
    """SGLang's sampler, except for batches of plain samples."""

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: Sequence[int],
        token_ids_logprobs: Sequence[list[int] | None],
        positions: torch.Tensor,
        **others: object,
    ) -> torch.Tensor:
        wants_more = any(top_logprobs_nums or ()) or any(ids is not None for ids in token_ids_logprobs or ())
        wants_more = wants_more or any(other is not None for other in others.values())
        if wants_more or self.enable_deterministic or SGLANG_RETURN_ORIGINAL_LOGPROB or not _is_plain(sampling_info):
            return super().forward(
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
                **others,
            )
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        tokens, logprobs = sample(logits, sampling_info.temperatures)
        if return_logprob:
            LogprobResult(token_logprobs=logprobs).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def _is_plain(info: SamplingBatchInfo) -> bool:
    """Whether all rows of a batch are sampled from the whole softmax, without their own seeds."""
    restricted = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    special = info.sampling_seed is not None or any(info.return_sampling_masks or ())
    return not (info.is_all_greedy or restricted or special)
