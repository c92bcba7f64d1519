"""A slot of a server that another worker speaks for: it keeps its GPU from others, and maybe runs a machine's share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.backends.sglang.share import ServerShare
from dagrl.backends.sglang.start import start_server
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.receiver import Route


class HeldSlot:
    """Does nothing of what it is asked: the server's first slot does it for all. See `GenerateEngine`."""

    takes_turns = False
    policy_version = 0
    sampled_tokens = 0

    def request_limits(self, longest: int) -> RequestLimits:
        """It wants nothing."""
        return RequestLimits(0, 0)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Nothing: it is never given requests."""
        assert not requests, "only the first slot of a server is given requests"
        return iter(())

    def abort(self) -> None:
        """Nothing is under way here."""

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """The first slot takes them for all."""
        self.policy_version = version

    def update_weights(self, route: Route, version: int) -> None:
        """The first slot takes them for all."""
        self.policy_version = version

    def sleep(self, residency: Residency) -> SleepReport:
        """The first slot gives the memory of all back, and tells of it."""
        return SleepReport(0.0, 0.0)

    def wake(self, residency: Residency) -> None:
        """The first slot brings all back."""

    def close(self) -> None:
        """There is nothing to free."""


class NodeShare(HeldSlot):
    """The processes of a server on one of its further machines. They take their orders from the first machine."""

    def __init__(
        self, model: ModelSpec, spec: SglangEngineSpec, ranks: RankContext, share: ServerShare, *, sleeps: bool
    ) -> None:
        """Start them, while the other machines' are started. ValueError and ServerError as `SglangEngine` has them."""
        self._server = start_server(model, spec, share, seed=ranks.seed, sleeps=sleeps)

    def close(self) -> None:
        """End the processes."""
        self._server.close()
