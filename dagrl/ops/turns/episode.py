"""The environment of one response: created at the first turn, stepped turn by turn, then closed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from dagrl.ops.turns.jobs import JobTimeoutError
from dagrl.plugins.calls import within_call
from dagrl.plugins.custom import raised_by
from dagrl.plugins.environment import Environment, EnvironmentClass, Observation


class NoObservationError(TypeError):
    """An environment's `step` did not return an Observation."""


class Episode:
    """One environment, used by one thread at a time."""

    def __init__(self, made_of: EnvironmentClass, fields: Mapping[str, Any]) -> None:
        self._made_of = made_of
        self._fields = {name: fields[name] for name in made_of.fields}
        self._environment: Environment | None = None
        self._lock = threading.Lock()
        self._asked = self._closed = False

    def step(self, text: str, *, last: bool) -> Observation:
        """The environment's observation; after the `last` step it is closed. Raises what the user's class raises."""
        self._asked = True
        with self._lock, within_call(self._made_of.make):
            assert not self._closed, "step after close"
            if self._environment is None:
                self._environment = self._made_of()
                self._environment.reset(**self._fields)
            observation = self._environment.step(text)
            if not isinstance(observation, Observation):
                raise NoObservationError(f"step returned {observation!r}; return a dagrl.Observation")
        if last or observation.ends:
            self.close()
        return observation

    def close(self) -> None:
        """Close the environment, after a running step."""
        with self._lock, within_call(self._made_of.make):
            if self._closed:
                return
            self._closed = True
            close = getattr(self._environment, "close", None)
            if close is not None:
                close()

    def leave(self) -> None:
        """Close the environment in the background, if it is open."""
        if self._asked and not self._closed:
            threading.Thread(target=self.close, daemon=True).start()

    def failure(self, cause: BaseException) -> Exception:
        """The error to raise for a failed step."""
        who = f"the environment `{self._made_of.place}`"
        if isinstance(cause, JobTimeoutError):
            return TimeoutError(f"{who} gave {cause}; raise `tool_timeout_s`")
        if isinstance(cause, NoObservationError):
            return TypeError(f"{who}: {cause}")
        return ValueError(f"{who} {raised_by(self._made_of.make.step, cause)}")
