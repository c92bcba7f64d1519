"""Draws the DAG as text, Mermaid, SVG or PNG. graphlay lays the pictures out and writes the SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dagrl.graph.dag import EXPERIENCE_NODE, PROMPTS_NODE, SAMPLES_NODE, Graph, GraphNode

_FILLS = ("#dbeafe", "#dcfce7", "#fde68a", "#fbcfe8", "#ddd6fe", "#fed7aa", "#cffafe")
_IMPLICIT_FILL = "#e5e7eb"
_HOST_FILL = "#f8fafc"
_SELECTED = "the selected groups"
_INK, _FAINT, _LINE = "#1f2937", "#4b5563", "#9ca3af"
_LAYOUT = {
    "direction": "topbottom",
    "spacing": {"node_gap": 22.0, "dummy_gap": 16.0, "layer_gap": 30.0, "port_gap": 14.0},
}
type Scene = dict[str, Any]
"""Values for graphlay's renderer."""
_BOX_WIDTH, _BOX_HEIGHT, _LINE_HEIGHT, _MARGIN = 90.0, 46.0, 13.0, 20.0
"""Pixels."""


def executor_of(node: GraphNode) -> str:
    """The name of the engine that runs a node, or ``host``."""
    return getattr(node.spec, "engine", None) or "host"


def subtitle_of(graph: Graph, name: str) -> str:
    """Describe a node in a few words: ``logprob on reference``."""
    node = graph.nodes[name]
    if node.name == PROMPTS_NODE:
        return "the data set"
    if node.name == EXPERIENCE_NODE:
        return "written for the other part" if node.inputs else "of the other part"
    if node.name == SAMPLES_NODE:
        return "written to the run folder"
    seldom = ", skipped" if name in graph.skipped else ", in validation" if name in graph.validates_only else ""
    return f"{getattr(node.spec, 'op', '')} on {executor_of(node)}{seldom}"


def draw_text(graph: Graph) -> str:
    """The nodes by stage, each with the columns it reads. The nodes of one stage can run at the same time."""
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
                lines.append(f"    writes {', '.join(node.outputs.values())}, which no node reads")
    return "\n".join(lines) + "\n"


def as_values(graph: Graph) -> dict[str, object]:
    """The nodes in topological order, and the columns between them, as plain values."""
    stages = stages_of(graph)
    return {
        "nodes": [
            {
                "name": name,
                "op": getattr(graph.nodes[name].spec, "op", None),
                "executor": executor_of(graph.nodes[name]),
                "stage": stages[name],
                "skipped": graph.skipped.get(name),
            }
            for name in graph.order
        ],
        "edges": [
            {"from": producer, "to": consumer, "columns": list(columns)}
            for (producer, consumer), columns in graph.edges.items()
        ],
    }


def draw_mermaid(graph: Graph) -> str:
    lines = ["flowchart TD"]
    for name, node in graph.nodes.items():
        left, right = ("([", "])") if node.spec is None else ("[", "]")
        # The prefix avoids Mermaid's keywords, such as `end`.
        lines.append(f'    n_{name}{left}"<b>{name}</b><br/>{subtitle_of(graph, name)}"{right}')
    for (producer, consumer), columns in arrows_of(graph).items():
        lines.append(f'    n_{producer} -->|"{"<br/>".join(columns)}"| n_{consumer}')
    for name, fill in _fills(graph).items():
        lines.append(f"    style n_{name} fill:{fill},stroke:{_LINE},color:{_INK}")
    return "\n".join(lines) + "\n"


def draw_svg(graph: Graph) -> str:
    """Draw the graph as a picture that opens in any browser."""
    import graphlay

    scene, _ = scene_of(graph)
    return graphlay.render_scene(scene) + "\n"


def draw_png(graph: Graph, path: Path, scale: int = 2) -> None:
    """Draw the same picture in pixels. ValueError if Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ValueError("PNG needs the package pillow, which is not installed; write an .svg file instead") from error
    scene, bounds = scene_of(graph)
    left, top = (bounds["min"][axis] - _MARGIN for axis in "xy")
    right, bottom = (bounds["max"][axis] + _MARGIN for axis in "xy")

    def pixels(*points: tuple[float, float]) -> list[tuple[float, float]]:
        return [((x - left) * scale, (y - top) * scale) for x, y in points]

    image = Image.new("RGB", (round((right - left) * scale), round((bottom - top) * scale)), "white")
    draw = ImageDraw.Draw(image)
    for edge in scene["edges"]:
        points = pixels(*((point["x"], point["y"]) for point in edge["points"]))
        draw.line(points, fill=_LINE, width=round(1.4 * scale), joint="curve")
        if edge["marker_end"]["kind"] != "none":
            (x, y), size = points[-1], 4 * scale
            draw.polygon([(x, y), (x - size, y - 2 * size), (x + size, y - 2 * size)], fill=_LINE)
    for node in scene["nodes"]:
        x, y, width, height = (node["rect"][key] for key in "xywh")
        box = pixels((x, y), (x + width, y + height))
        radius, outline = node["shape"]["corner_radius"] * scale, node["stroke"]["paint"]
        draw.rounded_rectangle(box, radius, fill=node["fill"], outline=outline, width=scale)
        for line in node["content"]:
            middle = pixels((x + width / 2, y + height / 2 + line["dy"]))[0]
            font = ImageFont.load_default(line["size"] * scale)
            draw.text(middle, line["text"], fill=line["color"], font=font, anchor="mm")
    image.save(path, format="PNG")


_TEXT_FORMATS: Mapping[str, Callable[[Graph], str]] = {".mmd": draw_mermaid, ".svg": draw_svg, ".txt": draw_text}


def write_drawing(graph: Graph, path: Path) -> None:
    """Draw in the format of the file's ending. ValueError for another ending or a folder that does not exist."""
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
    """Length of the longest path to each node; `samples` is in the last stage."""
    import networkx

    generations = [*networkx.topological_generations(graph.with_selection)]
    stages = {name: stage for stage, names in enumerate(generations) for name in names}
    return {**stages, SAMPLES_NODE: len(generations) - 1}


def scene_of(graph: Graph, *, box_height: float = _BOX_HEIGHT, least_width: float = _BOX_WIDTH) -> tuple[Scene, Scene]:
    """Lay the graph out; returns the drawing for graphlay's SVG renderer, and its bounds. Sizes are in pixels."""
    import graphlay

    plan = graphlay.Graph()
    for name in graph.nodes:
        width = max(least_width, 9 * len(name) + 24, 6.2 * len(subtitle_of(graph, name)) + 24)
        plan.node(name, width=width, height=box_height)
    # A label is a node on its arrow, so that the layout keeps it clear of boxes, lines and other labels.
    arrows = arrows_of(graph)
    for (producer, consumer), columns in arrows.items():
        width = max(6.4 * len(column) for column in columns) + 8
        label = plan.node((producer, consumer), width=width, height=_LINE_HEIGHT * len(columns) + 4)
        plan.edge(producer, label)
        plan.edge(label, consumer)
    layout = graphlay.layout(plan, options=_LAYOUT)
    scene = layout.sketch_scene(padding=_MARGIN)
    scene["font"]["family"] = "ui-sans-serif, system-ui, sans-serif"
    boxes, labels = scene["nodes"][: len(graph.nodes)], scene["nodes"][len(graph.nodes) :]
    fills = _fills(graph)
    for name, box in zip(graph.nodes, boxes, strict=True):
        box["fill"], box["stroke"]["paint"], box["shape"]["corner_radius"] = fills[name], _LINE, 8.0
        box["content"] = [_text(name, -8.0, 14.0, _INK, 600.0), _text(subtitle_of(graph, name), 10.0, 11.0, _FAINT)]
    for columns, label in zip(arrows.values(), labels, strict=True):
        label["stroke"] |= {"paint": "#ffffff", "width": 0.0}
        first = -(len(columns) - 1) / 2
        label["content"] = [
            _text(column, (first + place) * _LINE_HEIGHT, 11.0, _FAINT) for place, column in enumerate(columns)
        ]
    for edge in scene["edges"]:
        edge["stroke"] |= {"paint": _LINE, "width": 1.4}
    for edge in scene["edges"][::2]:
        edge["marker_end"] = {"kind": "none"}
    return scene, layout.bounds


def _text(text: str, dy: float, size: float, color: str, weight: float = 400.0) -> dict[str, object]:
    """One line of text, `dy` below the middle of its box."""
    line = {"kind": "text", "text": text, "dx": 0.0, "dy": dy, "size": size, "weight": weight, "color": color}
    return line | {"anchor": "middle", "baseline": "central"}


def arrows_of(graph: Graph) -> dict[tuple[str, str], tuple[str, ...]]:
    """(from, to) -> columns, or the groups that a filter selects."""
    selected = {(graph.filter, name): (_SELECTED,) for name in graph.select_from if graph.filter}
    return {**graph.edges, **selected}


def _fills(graph: Graph) -> dict[str, str]:
    engines = dict.fromkeys(executor_of(node) for node in graph.nodes.values() if hasattr(node.spec, "engine"))
    colours = {engine: _FILLS[index % len(_FILLS)] for index, engine in enumerate(engines)}
    return {
        name: _IMPLICIT_FILL if node.spec is None else colours.get(executor_of(node), _HOST_FILL)
        for name, node in graph.nodes.items()
    }
