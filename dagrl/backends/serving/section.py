"""Options that inference servers of all backends have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dagrl.config.fp8_weights import Fp8Weights, Granularity
from dagrl.config.schema.engine import EngineSpec


class ServerSpec(EngineSpec):
    """Servers that generate, as many as fit on a group."""

    server: dict[str, Any] = Field(default_factory=dict)
    """The server's own arguments, by their names."""
    quantization: Literal["fp8", "fp8_per_channel"] | None = None
    """Take the linear layers' weights in fp8, which the trainer's ranks quantise on the way, and multiply in fp8:
    ``fp8`` has a scale for each block of 128 x 128, ``fp8_per_channel`` one for each output channel. Needs
    ``weights_from``. The cache has an option for itself, ``server.kv_cache_dtype``."""
    modules_to_not_convert: tuple[str, ...] = ()
    """With ``quantization``: modules that stay in bfloat16, as ``model.layers.0`` or ``down_proj``."""

    @property
    def taken_fp8(self) -> Fp8Weights | None:
        """The weights of ``quantization``."""
        granularity = self.fp8_granularity
        return None if granularity is None else Fp8Weights(granularity, self.modules_to_not_convert)

    @property
    def fp8_granularity(self) -> Granularity | None:
        """The granularity of their scales."""
        if self.quantization is None:
            return None
        return "block" if self.quantization == "fp8" else "channel"
