"""The section of ``backend: vllm``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dagrl.backends.serving.section import ServerSpec
from dagrl.backends.vllm.fields import VllmFields
from dagrl.config.schema.library_fields import GivenFields

CPU_CACHE_GIB = 1
"""GiB of a server's cache on a CPU slot."""


class VllmEngineSpec(ServerSpec):
    """vLLM servers that generate, as many as fit on the group."""

    backend: Literal["vllm"]
    """vLLM: its engine runs in the worker, without an HTTP server. It usually needs an `environment`."""
    server: GivenFields[VllmFields] = Field(default_factory=dict)
    """Fields of vLLM's engine arguments. A server takes tensor_parallel_size x data_parallel_size GPUs."""

    context_field: ClassVar = "max_model_len"
    scored_tokens_kept_back: ClassVar = 1  # vLLM samples a token after each prompt.

    @property
    def tensor_size(self) -> int:
        """GPUs that share each layer."""
        return self.size("tensor_parallel_size")

    @property
    def attention_copies(self) -> int:
        """Copies of attention within a server, each with its own requests and cache; they share the experts."""
        return self.size("data_parallel_size")

    @property
    def gpus_per_server(self) -> int:
        return self.tensor_size * self.attention_copies


def utilization_of(spec: VllmEngineSpec, *, sleeps: bool) -> float:
    """The share of a GPU that a server fills: the file's, less than vLLM's for one that sleeps, or vLLM's."""
    # Colocated engines keep some memory even asleep.
    return float(spec.server.get("gpu_memory_utilization", 0.8 if sleeps else 0.92))
