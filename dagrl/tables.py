"""Renders tables and text with rich: with styles on a terminal, as plain text elsewhere."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table

_WIDTH = 10_000
"""Characters, so that rich cuts and folds nothing: pipes and searches need each row on one line."""
HEADING = "bold"


def table(
    rows: Iterable[Sequence[str]], *, headings: Sequence[str] = (), left: Container[int] = (0,)
) -> RenderableType:
    """A table without lines. The columns in `left` are aligned to the left, the others to the right."""
    cells = list(rows)
    built = Table(box=None, show_header=bool(headings), header_style=HEADING, padding=(0, 1), pad_edge=False)
    for index in range(max(map(len, [headings, *cells]))):
        heading = headings[index] if headings else ""
        built.add_column(heading, justify="left" if index in left else "right", no_wrap=True)
    for row in cells:
        built.add_row(*row)
    return Padding(built, (0, 0, 0, 2), expand=False)


def render(parts: Iterable[RenderableType]) -> str:
    """The parts below each other as text for standard output: styled if that is a terminal, else plain."""
    console = Console(width=_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
