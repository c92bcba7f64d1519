"""``backend: sglang``: servers that generate."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dagrl.backends.serving.section import ServerSpec
from dagrl.backends.sglang.fields import ServerFields
from dagrl.backends.sglang.layout import FP8_PAGE
from dagrl.config.schema.library_fields import GivenFields


class SglangEngineSpec(ServerSpec):
    """SGLang servers that generate, as many as fit on the group."""

    backend: Literal["sglang"]
    """SGLang: its schedulers run in separate processes, without an HTTP server."""
    server: GivenFields[ServerFields] = Field(default_factory=dict)
    """Fields of SGLang's ServerArgs. A server takes tp_size x pp_size GPUs, times dp_size without DP attention."""

    context_field: ClassVar = "context_length"

    @property
    def tensor_size(self) -> int:
        """GPUs that share each layer of a stage, or that have copies of its attention."""
        return self.size("tp_size")

    @property
    def stages(self) -> int:
        return self.size("pp_size")

    @property
    def attention_copies(self) -> int:
        """Copies of attention within ``tp_size``."""
        return self.size("dp_size") if self.server.get("enable_dp_attention") else 1

    @property
    def attention_size(self) -> int:
        """GPUs that share a copy of attention."""
        return max(1, self.tensor_size // self.attention_copies)

    @property
    def gpus_per_server(self) -> int:
        copies = 1 if self.server.get("enable_dp_attention") else self.size("dp_size")
        return self.tensor_size * self.stages * copies

    @property
    def page_size(self) -> int:
        """Tokens of a page of the cache. Models that cannot have larger ones are not served in fp8."""
        in_fp8 = self.taken_fp8 is not None and str(self.server.get("kv_cache_dtype")).startswith("fp8")
        return int(self.server.get("page_size", FP8_PAGE if in_fp8 else 1))
