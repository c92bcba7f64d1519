"""A generator on a SGLang server. `server.py` has the processes, `client.py` the requests."""

from __future__ import annotations

from typing import ClassVar

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.engine import ServerEngine
from dagrl.backends.sglang.client import Client
from dagrl.backends.sglang.layout import gpus_per_server
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare
from dagrl.backends.sglang.start import start_server
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.config.schema.engine import SentAdapter
from dagrl.model_files.end_tokens import end_tokens
from dagrl.model_files.images import image_settings
from dagrl.model_files.library_model import load_hf_config
from dagrl.model_files.tokenizer import load_tokenizer


class SglangEngine(ServerEngine):
    """One SGLang server."""

    kinds: ClassVar = {
        Residency.AWAKE: frozenset[str](),
        Residency.WEIGHTS: frozenset({"kv_cache", "cuda_graph"}),
        Residency.ASLEEP: frozenset({"kv_cache", "cuda_graph", "weights"}),
    }
    more_room = "raise mem_fraction_static or max_total_tokens, use more GPUs per server (tp_size)"

    def __init__(
        self,
        model: ModelSpec,
        spec: SglangEngineSpec,
        ranks: RankContext,
        share: ServerShare,
        *,
        sleeps: bool,
        adapter: SentAdapter | None = None,
    ) -> None:
        """Start the server. With an `adapter` it has the model's weights, and takes adapters instead of weights.

        Raises ValueError for an invalid model or argument, ServerError if it fails to start.
        """
        # Pipeline stages are updated one after the other.
        stages = spec.server.get("pp_size", 1)
        tokenizer = load_tokenizer(model)
        routing = _routing(model) if spec.server.get("enable_return_routed_experts") else None
        server = start_server(model, spec, share, seed=ranks.seed, sleeps=sleeps, adapter=adapter)
        super().__init__(
            spec,
            server,
            Client(server.engine, routing, adapter, image_settings(model)),
            waves=[gpus_per_server(spec.server) // stages] * stages,
            gpus=share.gpus,
            tokenizer=tokenizer,
            ends=end_tokens(model, tokenizer),
            timeout_s=ranks.timeout_s,
        )


def _routing(model: ModelSpec) -> tuple[int, int]:
    """Number of layers, and of experts per token."""
    config = load_hf_config(model).get_text_config()
    return config.num_hidden_layers, config.num_experts_per_tok
