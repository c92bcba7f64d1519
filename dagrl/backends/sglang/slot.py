"""The first slot of a server on a further machine, whose worker runs the processes there."""

from __future__ import annotations

from dagrl.backends.backend import RankContext
from dagrl.backends.serving.held_slot import HeldSlot
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare
from dagrl.backends.sglang.start import start_server
from dagrl.config.schema import ModelSpec
from dagrl.config.schema.engine import SentAdapter


class NodeShare(HeldSlot):
    """The processes of a server on a further machine, controlled by the first one."""

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
        """Start them together with those of the other machines. Raises ValueError and ServerError as
        `SglangEngine` does.
        """
        self._server = start_server(model, spec, share, seed=ranks.seed, sleeps=sleeps, adapter=adapter)

    def close(self) -> None:
        """Stop the processes."""
        self._server.close()
