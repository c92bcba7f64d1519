"""The process in which agents' functions run. `FunctionProcesses` of the worker starts it, and speaks JSON with it.

    python -P -m dagrl.ops.agents.function_process DESCRIPTOR

The first message names the function. Then ``[number, url, key, row]`` runs it and ``[number]`` cancels that run; the
answers are ``[number, reward, metrics, error]``, with null for a reward that is not given and for no error. The process
ends when its worker does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dagrl.ops.agents.functions import FunctionProgram
from dagrl.ops.agents.programs import ProgramError
from dagrl.plugins.custom import load_function


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    named = json.loads(connection.recv_bytes())
    folder = Path(named["folder"]) if named["folder"] is not None else None
    program = FunctionProgram(load_function(named["function"], folder), named["function"], named["args"])
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="runs", daemon=True).start()
    runs: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, url: str, key: str, row: Mapping[str, object]) -> None:
        answer: list[Any] = [number, None, {}, None]
        try:
            verdict = await program.run(url, key, row)
            answer[1:3] = verdict.reward, dict(verdict.metrics)
        except ProgramError as error:
            answer[3] = str(error)
        finally:
            del runs[number]
        connection.send_bytes(json.dumps(answer).encode())

    def begin(number: int, *run_of: Any) -> None:
        runs[number] = loop.create_task(run(number, *run_of))

    def cancel(number: int) -> None:
        if number in runs:
            runs[number].cancel()

    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # Not the exit of an interpreter, which would wait for threads of the function.
            os._exit(0)
        loop.call_soon_threadsafe(begin if len(message) > 1 else cancel, *message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
