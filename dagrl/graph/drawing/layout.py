"""Where the boxes, lines and labels of a layered drawing go. Pure geometry; `draw.py` turns it into a picture.

Every stage is a row of boxes. Between two rows of boxes lies a row of labels, and a line takes a slot of its own in
each row that it crosses, so that boxes and labels never cover each other. A line is vertical within a row and bends
only in the gaps between rows, so it meets its label in the middle and crosses no other label or box. Slots are ordered
within their row by the mean place of their neighbours (Sugiyama's barycentres), then placed as close to those as their
widths allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

BOX_HEIGHT = 46.0
LINE_HEIGHT = 13.0
PADDING = 8.0
_GAP, _MARGIN = 22.0, 20.0
_LEAST_ROW_GAP, _MOST_ROW_GAP, _RISE = 26.0, 44.0, 0.12
"""A gap between rows grows with the widest bend in it, by `_RISE` of its width, so that lines are not too flat."""
_SWEEPS = 12
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A node, by its middle."""

    name: str
    subtitle: str
    x: float
    y: float
    width: float


@dataclass(frozen=True, slots=True)
class Label:
    """The columns that a line carries, by their middle."""

    lines: Sequence[str]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Edge:
    """A line from a box to a box through the slots that it holds, downwards."""

    points: tuple[Point, ...]

    def curve(self, steps: int = 12) -> list[Point]:
        """Points along the Bezier curves that leave and reach each point vertically."""
        curve = [self.points[0]]
        for (x0, y0), (x1, y1) in pairwise(self.points):
            for step in range(1, steps + 1):
                t = step / steps
                ease = 3 * t * t - 2 * t * t * t
                # Control points at half the height: y is the Bernstein sum of y0, middle, middle, y1.
                height = 1.5 * t * (1 - t) + t * t * t
                curve.append((x0 + (x1 - x0) * ease, y0 + (y1 - y0) * height))
        return curve


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything to draw, in pixels from the top left."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]
    edges: tuple[Edge, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    width: float
    height: float
    lines: Sequence[str] = ()
    x: float = 0.0
    y: float = 0.0
    row_height: float = 0.0
    above: list[_Slot] = field(default_factory=list)
    below: list[_Slot] = field(default_factory=list)


def lay_out(
    subtitles: Mapping[str, str], edges: Mapping[tuple[str, str], Sequence[str]], stages: Mapping[str, int]
) -> Picture:
    """Lay out nodes (name -> subtitle) in their stages; edges, (from, to) -> labels, all go to a later stage."""
    rows: list[list[_Slot]] = [[] for _ in range(2 * max(stages.values()) + 1)]
    boxes: dict[str, _Slot] = {}
    for name, subtitle in subtitles.items():
        boxes[name] = _Slot(max(90.0, 9 * len(name) + 24, 6.2 * len(subtitle) + 24), BOX_HEIGHT)
        rows[2 * stages[name]].append(boxes[name])
    paths = []
    for (start, end), labels in edges.items():
        path = [boxes[start]]
        last = 2 * stages[end]
        for row in range(2 * stages[start] + 1, last):
            labelled = row == last - 1
            width = max(6.4 * len(line) for line in labels) + PADDING if labelled else 4.0
            slot = _Slot(width, LINE_HEIGHT * len(labels) + PADDING if labelled else 4.0, labels if labelled else ())
            rows[row].append(slot)
            path.append(slot)
        path.append(boxes[end])
        paths.append(path)
        for upper, lower in pairwise(path):
            upper.below.append(lower)
            lower.above.append(upper)
    _place(rows)
    labelled_slots = [slot for row in rows for slot in row if slot.lines]
    every = [slot for row in rows for slot in row]
    return Picture(
        max(slot.x + slot.width / 2 for slot in every) + _MARGIN,
        max(slot.y + slot.height / 2 for slot in every) + _MARGIN,
        tuple(Box(name, subtitles[name], slot.x, slot.y, slot.width) for name, slot in boxes.items()),
        tuple(Label(slot.lines, slot.x, slot.y, slot.width, slot.height) for slot in labelled_slots),
        tuple(_edge(path) for path in paths),
    )


def _place(rows: list[list[_Slot]]) -> None:
    """Give every slot its x and y."""
    for row in rows:
        _pack(row, [0.0] * len(row))
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else rows[::-1]:
            wanted = {slot: _mean(slot.above if down else slot.below, slot.x) for slot in row}
            row.sort(key=wanted.__getitem__)
            _pack(row, [wanted[slot] for slot in row])
    left = min(slot.x - slot.width / 2 for row in rows for slot in row)
    top = _MARGIN
    for row in rows:
        height = max((slot.height for slot in row), default=0.0)
        for slot in row:
            slot.x += _MARGIN - left
            slot.y, slot.row_height = top + height / 2, height
        widest = max((abs(lower.x - slot.x) for slot in row for lower in slot.below), default=0.0)
        top += height + min(max(_LEAST_ROW_GAP, _RISE * widest), _MOST_ROW_GAP)


def _mean(slots: Iterable[_Slot], otherwise: float) -> float:
    places = [slot.x for slot in slots]
    return sum(places) / len(places) if places else otherwise


def _pack(row: list[_Slot], wanted: list[float]) -> None:
    """Place a row's slots in order, without overlap, as close to `wanted` as can be (least squares).

    With the widths taken off, that is isotonic regression: neighbours that clash merge into a block around their mean.
    """
    offsets, offset = [], 0.0
    for index, slot in enumerate(row):
        if index:
            offset += (row[index - 1].width + slot.width) / 2 + _GAP
        offsets.append(offset)
    blocks: list[tuple[float, int]] = []
    for target, shift in zip(wanted, offsets, strict=True):
        total, count = target - shift, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, size = blocks.pop()
            total, count = total + before, count + size
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    for slot, start, shift in zip(row, starts, offsets, strict=True):
        slot.x = start + shift


def _edge(path: list[_Slot]) -> Edge:
    first, *between, last = path
    points = [(first.x, first.y + first.height / 2)]
    for slot in between:
        points += [(slot.x, slot.y - slot.row_height / 2), (slot.x, slot.y + slot.row_height / 2)]
    return Edge((*points, (last.x, last.y - last.height / 2)))
