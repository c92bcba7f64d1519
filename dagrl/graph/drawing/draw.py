"""The DAG for people: as text, as Mermaid, as SVG, as PNG. `layout.py` says where things go in a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from dagrl.graph.dag import PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode
from dagrl.graph.drawing.layout import BOX_HEIGHT, LINE_HEIGHT, PADDING, Picture, lay_out

_FILLS = ("#dbeafe", "#dcfce7", "#fde68a", "#fbcfe8", "#ddd6fe", "#fed7aa", "#cffafe")
_IMPLICIT_FILL = "#e5e7eb"
_HOST_FILL = "#f8fafc"
_SELECTED = "the groups that pass"
_INK, _FAINT, _LINE = "#1f2937", "#4b5563", "#9ca3af"


def executor_of(node: GraphNode) -> str:
    """What runs a node: its engine's name, or ``host``."""
    return getattr(node.spec, "engine", None) or "host"


def subtitle_of(graph: Graph, name: str) -> str:
    """What a node is, in a few words: ``logprob on reference``."""
    node = graph.nodes[name]
    if node.name == PROMPTS_NODE:
        return "the data set"
    if node.name == SAMPLES_NODE:
        return "written to the run folder"
    seldom = ", skipped" if name in graph.skipped else ", in validation" if name in graph.validates_only else ""
    return f"{getattr(node.spec, 'op', '')} on {executor_of(node)}{seldom}"


def draw_text(graph: Graph) -> str:
    """The nodes by stage (those of one stage can run at the same time), each with what it reads from whom."""
    stages = stages_of(graph)
    lines = []
    for stage in range(max(stages.values()) + 1):
        lines.append(f"stage {stage}")
        for name in (name for name in graph.order if stages[name] == stage):
            node = graph.nodes[name]
            lines.append(f"  {name}  ({subtitle_of(graph, name)})")
            if name in graph.skipped:
                lines.append(f"    skipped: {graph.skipped[name]}")
            for producer in graph.producers(name):
                lines.append(f"    {producer} -> {', '.join(graph.edges[producer, name])}")
            if name in graph.select_from:
                lines.append(f"    {graph.filter} -> {_SELECTED}")
            if node.outputs and not graph.consumers(name):
                lines.append(f"    writes {', '.join(node.outputs.values())}, which nobody reads")
    return "\n".join(lines) + "\n"


def draw_mermaid(graph: Graph) -> str:
    """A Mermaid flowchart."""
    lines = ["flowchart TD"]
    for name, node in graph.nodes.items():
        left, right = ("([", "])") if node.spec is None else ("[", "]")
        # A prefix, because Mermaid trips over ids that are its own words, such as `end`.
        lines.append(f'    n_{name}{left}"<b>{name}</b><br/>{subtitle_of(graph, name)}"{right}')
    for (producer, consumer), columns in _arrows(graph).items():
        lines.append(f'    n_{producer} -->|"{"<br/>".join(columns)}"| n_{consumer}')
    for name, fill in _fills(graph).items():
        lines.append(f"    style n_{name} fill:{fill},stroke:{_LINE},color:{_INK}")
    return "\n".join(lines) + "\n"


def draw_svg(graph: Graph) -> str:
    """A picture of the graph that needs nothing but a browser."""
    picture = _picture(graph)
    fills = _fills(graph)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width:.0f} {picture.height:.0f}" '
        f'width="{picture.width:.0f}" height="{picture.height:.0f}" '
        'font-family="ui-sans-serif, system-ui, sans-serif" text-anchor="middle">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{_LINE}"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for edge in picture.edges:
        path = f"M{edge.points[0][0]:.1f} {edge.points[0][1]:.1f}"
        for (x0, y0), (x1, y1) in pairwise(edge.points):
            middle = (y0 + y1) / 2
            path += f" C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
        parts.append(f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="1.4" marker-end="url(#arrow)"/>')
    for label in picture.labels:
        left, top = label.x - label.width / 2, label.y - label.height / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{label.width:.1f}" height="{label.height:.1f}" '
            'rx="4" fill="white" fill-opacity="0.92"/>'
        )
        for index, line in enumerate(label.lines):
            y = top + PADDING / 2 + LINE_HEIGHT * (index + 0.75)
            parts.append(f'<text x="{label.x:.1f}" y="{y:.1f}" font-size="11" fill="{_FAINT}">{escape(line)}</text>')
    for box in picture.boxes:
        left, top = box.x - box.width / 2, box.y - BOX_HEIGHT / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{BOX_HEIGHT}" rx="8" '
            f'fill="{fills[box.name]}" stroke="{_LINE}"/>'
            f'<text x="{box.x:.1f}" y="{box.y - 4:.1f}" font-size="14" font-weight="600" fill="{_INK}">'
            f"{escape(box.name)}</text>"
            f'<text x="{box.x:.1f}" y="{box.y + 14:.1f}" font-size="11" fill="{_FAINT}">{escape(box.subtitle)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_png(graph: Graph, path: Path, scale: int = 2) -> None:
    """The same picture in pixels. ValueError where Pillow, which draws it, is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ValueError("PNG needs the package pillow, which is not installed; write an .svg file instead") from error
    picture = _picture(graph)
    fills = _fills(graph)
    image = Image.new("RGB", (round(picture.width * scale), round(picture.height * scale)), "white")
    draw = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size * scale) for size in (11, 14)}
    for edge in picture.edges:
        points = [(x * scale, y * scale) for x, y in edge.curve()]
        draw.line(points, fill=_LINE, width=round(1.4 * scale), joint="curve")
        (x, y), size = points[-1], 4 * scale
        draw.polygon([(x, y), (x - size, y - 2 * size), (x + size, y - 2 * size)], fill=_LINE)
    for label in picture.labels:
        corner = (label.x - label.width / 2, label.y - label.height / 2)
        end = (corner[0] + label.width, corner[1] + label.height)
        draw.rectangle([value * scale for value in (*corner, *end)], fill="white")
        for index, line in enumerate(label.lines):
            y = corner[1] + PADDING / 2 + LINE_HEIGHT * (index + 0.5)
            draw.text((label.x * scale, y * scale), line, fill=_FAINT, font=fonts[11], anchor="mm")
    for box in picture.boxes:
        corners = (box.x - box.width / 2, box.y - BOX_HEIGHT / 2, box.x + box.width / 2, box.y + BOX_HEIGHT / 2)
        shape = [value * scale for value in corners]
        draw.rounded_rectangle(shape, radius=8 * scale, fill=fills[box.name], outline=_LINE, width=scale)
        draw.text((box.x * scale, (box.y - 9) * scale), box.name, fill=_INK, font=fonts[14], anchor="mm")
        draw.text((box.x * scale, (box.y + 10) * scale), box.subtitle, fill=_FAINT, font=fonts[11], anchor="mm")
    image.save(path, format="PNG")


_TEXT_FORMATS: Mapping[str, Callable[[Graph], str]] = {".mmd": draw_mermaid, ".svg": draw_svg, ".txt": draw_text}


def write_drawing(graph: Graph, path: Path) -> None:
    """Draw in the format that the file's ending names. ValueError for another ending, or a folder that is not there."""
    ending = path.suffix.lower()
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it first")
    if ending == ".png":
        draw_png(graph, path)
    elif ending in _TEXT_FORMATS:
        path.write_text(_TEXT_FORMATS[ending](graph), encoding="utf-8")
    else:
        raise ValueError(f"{path} does not say a format; end it in .svg, .png, .mmd or .txt")


def stages_of(graph: Graph) -> dict[str, int]:
    """How many nodes at least must run one after the other before each node; `samples` is in the last stage."""
    stages: dict[str, int] = {}
    for name in graph.order:
        waits_for = (*graph.producers(name), *([graph.filter] if graph.filter and name in graph.select_from else []))
        stages[name] = max((stages[each] + 1 for each in waits_for), default=0)
    stages[SAMPLES_NODE] = max(stages.values())
    return stages


def _picture(graph: Graph) -> Picture:
    subtitles = {name: subtitle_of(graph, name) for name in graph.nodes}
    return lay_out(subtitles, _arrows(graph), stages_of(graph))


def _arrows(graph: Graph) -> dict[tuple[str, str], tuple[str, ...]]:
    """(from, to) -> what goes that way: columns, and which groups a filter has let pass."""
    selected = {(graph.filter, name): (_SELECTED,) for name in graph.select_from if graph.filter}
    return {**graph.edges, **selected}


def _fills(graph: Graph) -> dict[str, str]:
    engines = dict.fromkeys(executor_of(node) for node in graph.nodes.values() if hasattr(node.spec, "engine"))
    colours = {engine: _FILLS[index % len(_FILLS)] for index, engine in enumerate(engines)}
    return {
        name: _IMPLICIT_FILL if node.spec is None else colours.get(executor_of(node), _HOST_FILL)
        for name, node in graph.nodes.items()
    }
