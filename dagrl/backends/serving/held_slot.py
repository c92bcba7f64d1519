"""A further slot of a server, which only reserves a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.backends.base import Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.receiver import Route


class HeldSlot:
    """A slot without work: the server's first slot serves all. See `GenerateEngine`."""

    serializes_calls = False
    policy_version = 0
    sampled_tokens = 0

    def request_limits(self, longest: int) -> RequestLimits:
        """It takes no requests."""
        return RequestLimits(0, 0)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        """Nothing: it receives no requests."""
        assert not requests, "only the first slot of a server receives requests"
        return iter(())

    def abort(self) -> None:
        """Do nothing."""

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Do nothing: the first slot updates all."""
        self.policy_version = version

    def update_weights(self, route: Route, version: int) -> None:
        """Do nothing: the first slot updates all."""
        self.policy_version = version

    def sleep(self, residency: Residency) -> SleepReport:
        """Do nothing: the first slot releases and reports the memory of all."""
        return SleepReport(0.0, 0.0)

    def wake(self, residency: Residency) -> None:
        """Do nothing: the first slot wakes all."""

    def close(self) -> None:
        """Do nothing."""
