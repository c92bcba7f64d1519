"""Notices when a process of the run's own Ray ends.

Ray itself lets the driver go on for a minute without its control store, and then ends it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dagrl.workers.errors import RayLostError, RunError

_WATCH_S = 1.0
_LOG_LINES = 100
"""Last lines of the process's logs that go with the error."""


@asynccontextmanager
async def while_ray_lives() -> AsyncIterator[None]:
    """Within the context, raise RayLostError if a process ends that this run's own Ray has started on this machine.

    That is the cause of any other failure, too.
    """
    main = asyncio.current_task()
    assert main is not None
    lost: RayLostError | None = None

    async def watch() -> None:
        nonlocal lost
        while (lost := ended_process()) is None:
            await asyncio.sleep(_WATCH_S)
        main.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if lost is None:
            raise
        main.uncancel()
        raise lost from None
    except RunError as error:
        if (cause := ended_process()) is not None:
            raise cause from error
        raise
    finally:
        watcher.cancel()


def ended_process() -> RayLostError | None:
    """The error for a process of Ray that has ended, if there is one. Ray that was joined has none here."""
    from ray._private import worker

    node = worker._global_node
    for name, started in node.all_processes.items() if node else ():
        for server in started:
            if (code := server.process.poll()) is not None:
                what = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
                return RayLostError(
                    f"the process {what}",
                    worker=f"Ray's {name} (pid {server.process.pid})",
                    hint="was it killed, or out of memory (see `dmesg`)? `dagrl run` goes on from the last checkpoint",
                    details=_ends_of_logs(Path(node.get_logs_dir_path()), name),
                )
    return None


def _ends_of_logs(logs: Path, name: str) -> str:
    words = []
    for log in sorted(logs.glob(f"{name}.*")):
        if lines := log.read_text(errors="replace").splitlines()[-_LOG_LINES:]:
            words += [f"{log.name}:", *lines]
    return "\n".join(words)
