"""Options that inference servers of all backends have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dagrl.config.block_fp8 import BlockFp8
from dagrl.config.schema.engine import EngineSpec


class ServerSpec(EngineSpec):
    """Servers that generate, as many as fit on a group."""

    server: dict[str, Any] = Field(default_factory=dict)
    """The server's own arguments, by their names."""
    quantization: Literal["fp8"] | None = None
    """``fp8``: take the linear layers' weights in blockwise fp8, which the trainer's ranks quantise on the way, and
    multiply in fp8. Needs ``weights_from``. The cache has an option for itself, ``server.kv_cache_dtype``."""
    modules_to_not_convert: tuple[str, ...] = ()
    """With ``quantization``: modules that stay in bfloat16, as ``model.layers.0`` or ``down_proj``."""

    @property
    def taken_fp8(self) -> BlockFp8 | None:
        """The weights of ``quantization``."""
        return BlockFp8(self.modules_to_not_convert) if self.quantization == "fp8" else None
