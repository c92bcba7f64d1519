"""``environment: "dagrl.tools.gymnasium:Game"``: an environment of Gymnasium, which the policy plays as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dagrl.plugins.custom import load_function
from dagrl.plugins.environment import Observation

if TYPE_CHECKING:
    from gymnasium import Env, Space

_NUMBER = re.compile(r"-?\d+")


class Game:
    """One episode. All responses to a row play from the same start: its ``extra_info.seed``."""

    def __init__(
        self,
        id: str,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        show: str | None = None,
        read: str | None = None,
        invalid_reward: float = 0.0,
    ) -> None:
        """Make the environment `id` with these `options`.

        `show` and `read` are functions, ``module:function``: `show` maps an observation and the environment to text,
        `read` a response and the environment to an action, with ValueError for a response without an action. By default
        an observation is the environment's rendering (``options: {render_mode: ansi}``), or its value. An action is the
        last number of a response (discrete spaces), the response (text), or the response as JSON. An unreadable action
        is answered with the error and the reward `invalid_reward`.
        """
        import gymnasium

        self._environment: Env[Any, Any] = gymnasium.make(id, **options)
        self._show: Callable[[Any, Any], str] = load_function(show) if show else shown
        self._read: Callable[[str, Any], Any] = load_function(read) if read else read_action
        self._invalid_reward = invalid_reward

    def reset(self, extra_info: Mapping[str, Any]) -> str:
        """Start the episode; returns its first observation as text, which belongs in the prompt."""
        observation, _ = self._environment.reset(seed=extra_info.get("seed", 0))
        return self._show(observation, self._environment)

    def step(self, response: str) -> Observation:
        try:
            action = self._read(response, self._environment)
        except ValueError as error:
            return Observation(f"This is no action: {error}", reward=self._invalid_reward)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        ends = bool(terminated or truncated)
        return Observation(self._show(observation, self._environment), reward=float(reward), done=ends)

    def close(self) -> None:
        self._environment.close()


def shown(observation: Any, environment: Env[Any, Any]) -> str:
    """The environment's text rendering, or the observation."""
    if environment.render_mode == "ansi":
        return str(environment.render()).strip("\n")
    return observation if isinstance(observation, str) else str(observation)


def read_action(response: str, environment: Env[Any, Any]) -> Any:
    """The action of a response, by the kind of the action space. Raises ValueError without an action."""
    from gymnasium import spaces

    space: Space[Any] = environment.action_space
    if isinstance(space, spaces.Text):
        action: Any = response
    elif isinstance(space, spaces.Discrete):
        numbers = _NUMBER.findall(response)
        if not numbers:
            raise ValueError(f"answer with a number from {space.start} to {space.start + space.n - 1}")
        action = int(numbers[-1])
    else:
        action = space.from_jsonable([json.loads(response)])[0]
    if not space.contains(action):
        raise ValueError(f"{action} is not in {space}")
    return action
