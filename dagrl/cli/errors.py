"""Ends a command with one sentence on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dagrl.config.errors import PipelineError, bounded


@contextmanager
def exit_on(command: str, *errors: type[Exception], code: int = 2) -> Iterator[None]:
    """Exit with `code` after one of `errors`. A PipelineError passes: `main` prints its lines."""
    try:
        yield
    except PipelineError:
        raise
    except errors as error:
        complain(f"dagrl {command}", error)
        raise typer.Exit(code) from None


def complain(command: str, problem: object) -> None:
    """Print why a command fails, cut to a bounded length: it may echo arguments of any length."""
    print(bounded(f"{command}: {problem}"), file=sys.stderr)
