"""Patches SGLang to run on CPUs without its kernels. An entry point that SGLang loads in each process."""

from __future__ import annotations


def prepare_cpu() -> None:
    """Without a GPU, avoid a vllm kernel, pinned host memory, and padding for kernels of other builds."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.configs import update_config
    from sglang.srt.layers.rotary_embedding import base as rotary_embedding
    from sglang.srt.state_capturer import base as state_capturer

    rotary_embedding._is_cpu = True
    # It would pad MLPs and experts for its own build's kernels, with uninitialised memory for experts.
    update_config.update_intermediate_size = lambda model_config, *_: model_config

    class PageableHostCache(state_capturer.BaseHostCache):
        def __init__(self, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
            self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
            self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    state_capturer.BaseHostCache = PageableHostCache
