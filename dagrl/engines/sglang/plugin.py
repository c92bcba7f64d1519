"""Lets SGLang run on a CPU that it has no kernels for. An entry point: SGLang calls it in each of its processes."""

from __future__ import annotations


def prepare_cpu() -> None:
    """Without a GPU, have SGLang's rotary embedding take its plain torch form: it would look for a vllm kernel."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.layers.rotary_embedding import base

    base._is_cpu = True
