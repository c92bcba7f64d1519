"""The descriptor and the engine of ``backend: repeat``."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dagrl.backends.backend import Backend, EngineCheck, EngineStart
from repeat_backend.section import RepeatEngineSpec


class RepeatBackend(Backend[RepeatEngineSpec]):
    name = "repeat"
    summary = "repeats the last token of the prompt"

    def validate(self, check: EngineCheck[RepeatEngineSpec]) -> None:
        if check.engine.times < 1:
            check.findings.error((*check.place, "times"), "must be at least 1; choose 1 or more")

    def build(self, start: EngineStart) -> "RepeatEngine":
        return RepeatEngine(start.section(RepeatEngineSpec).times)


class RepeatEngine:
    takes_turns = True
    sampled_tokens = 0
    policy_version = 0

    def __init__(self, times: int) -> None:
        self._times = times

    def request_limits(self, longest: int) -> Any:
        from dagrl.backends.base import RequestLimits

        return RequestLimits(8, 8)

    def generate(self, requests: Sequence[Any], sampling: Any) -> Iterator[Any]:
        from dagrl.backends.base import Completion

        for index, request in enumerate(requests):
            self.sampled_tokens += self._times
            tokens = np.repeat(request.prompt[-1:], self._times)
            yield Completion(index, tokens, np.zeros(self._times, np.float32), "stop", self.policy_version)

    def abort(self) -> None: ...

    def load_weights(self, buckets: Iterator[Any], version: int) -> None:
        for _ in buckets:
            pass
        self.policy_version = version

    def sleep(self, residency: Any) -> Any:
        from dagrl.backends.base import SleepReport

        return SleepReport(0.0, 0.0)

    def wake(self, residency: Any) -> None: ...

    def close(self) -> None: ...


BACKEND = RepeatBackend()
