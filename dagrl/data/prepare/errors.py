"""Ends a script with one sentence on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dagrl.config.errors import bounded


@contextmanager
def exit_on_errors(script: str) -> Iterator[None]:
    """Exit with 2, as commands do, after what the user or a file did wrong: a ValueError or an OSError.

    `script` is its path, whose name begins the sentence, as in messages of argparse.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        text = bounded(f"{Path(script).name}: {error}")
        print(text, file=sys.stderr)
        end = SystemExit(text)
        end.code = 2
        raise end from None
