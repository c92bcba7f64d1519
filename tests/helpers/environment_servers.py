"""Real servers of OpenEnv and NeMo Gym, run by the Python that has their packages: prints their addresses as JSON.

Each episode of sums adds a line to the file in the first argument: OpenEnv's when it begins, NeMo Gym's when it ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import uvicorn
from fastmcp import FastMCP
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import ServerClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from resources_servers.blackjack.app import BlackjackEnv
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer


def log(name: str) -> None:
    with Path(sys.argv[1]).open("a") as file:
        file.write(name + "\n")


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Sums(Environment[Say, Seen, State]):
    """Two sums of one digit; a right answer is worth 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        log("openenv")
        self.terms, self.turn = divmod(seed or 0, 4), 0
        return Seen(text=f"{self.terms[0]}+{self.terms[1]}=")

    def step(self, action: Say, timeout_s: float | None = None, **options: Any) -> Seen:
        self.turn += 1
        right = action.message == str(sum(self.terms))
        self.terms = (self.terms[0], 1)
        return Seen(text=f"{self.terms[0]}+1=", reward=0.5 * right, done=self.turn == 2)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)


class Dice(MCPEnvironment):
    """A tool, called twice."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server, self.calls = FastMCP("dice"), 0

        @server.tool()
        def roll(sides: int) -> int:
            """Roll a die."""
            return sides

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Observation:
        return Observation(reward=0.25)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        raise ValueError("only tools")

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        seen = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction):
            self.calls += 1
            seen.reward, seen.done = 1.0, self.calls == 2
        return seen

    @property
    def state(self) -> State:
        return State(step_count=self.calls)


class SumsVerifyRequest(BaseVerifyRequest):
    total: int


class SumsVerifyResponse(BaseVerifyResponse):
    length: int


class SumsServer(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    async def verify(self, body: SumsVerifyRequest) -> SumsVerifyResponse:
        log("nemo_gym")
        said = body.response.output[-1].content[0].text
        return SumsVerifyResponse(**body.model_dump(), reward=float(said == str(body.total)), length=len(said))


def serve(app: Any) -> str:
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.02)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def gym(made: type[SimpleResourcesServer]) -> str:
    """As `run_webserver` of the package, without its cluster and its configuration from the command line."""
    config = made.model_fields["config"].annotation
    given = {"host": "127.0.0.1", "port": 0, "name": made.__name__, "entrypoint": "app.py", "domain": "other"}
    return serve(made(config=config(**given), server_client=MagicMock(spec=ServerClient)).setup_webserver())


if __name__ == "__main__":
    addresses = {
        # Fewer sessions than episodes at a time.
        "sums": serve(create_app(Sums, Say, Seen, max_concurrent_envs=6)),
        "dice": serve(create_app(Dice, CallToolAction, CallToolObservation)),
        "gym_sums": gym(SumsServer),
        "counter": gym(StatefulCounterResourcesServer),
        "blackjack": gym(BlackjackEnv),
    }
    print(json.dumps(addresses), flush=True)
    # Until the test ends.
    sys.stdin.read()
