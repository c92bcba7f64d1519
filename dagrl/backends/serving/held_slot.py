"""A further slot of a server, whose first slot serves all requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dagrl.backends.base import Completion, GenerationRequest, RequestLimits, SleepReport
from dagrl.backends.serving.running_server import RunningServer
from dagrl.config.residency import Residency
from dagrl.config.schema import SamplingSpec
from dagrl.weight_sync.manifest import Bucket
from dagrl.weight_sync.receiver import Route


class HeldSlot:
    """A slot that only reserves its device, or also runs the server's processes on its machine.

    See `GenerateEngine`. The first slot updates the weights of all, and releases and reports their memory.
    """

    serializes_calls = False
    policy_version = 0
    sampled_tokens = 0

    def __init__(self, server: RunningServer | None = None) -> None:
        """`server`: the processes on this machine."""
        self._server = server

    def request_limits(self, longest: int) -> RequestLimits:
        return RequestLimits(0, 0)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> Iterator[Completion]:
        assert not requests, "only the first slot of a server receives requests"
        return iter(())

    def abort(self) -> None:
        pass

    def load_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        self.policy_version = version

    def update_weights(self, route: Route, version: int) -> None:
        self.policy_version = version

    def sleep(self, residency: Residency) -> SleepReport:
        return SleepReport(0.0, 0.0)

    def wake(self, residency: Residency) -> None:
        pass

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
