"""Ends a script with one sentence on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.config.errors import bounded


@contextmanager
def exit_on_errors(script: str) -> Iterator[None]:
    """Exit with status 2, as commands do, on a ValueError or an OSError, and print it as one sentence.

    `script` is the path of the script. The sentence begins with its file name, as messages of argparse do.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        text = bounded(f"{Path(script).name}: {error}")
        print(text, file=sys.stderr)
        end = SystemExit(text)
        end.code = 2
        raise end from None
