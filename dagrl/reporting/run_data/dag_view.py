"""The DAG of a run's pipeline, laid out: boxes, arrows and the columns on them."""

from __future__ import annotations

from typing import Any

from dagrl.graph.dag import Graph
from dagrl.graph.drawing.draw import arrows_of, executor_of, scene_of, subtitle_of

_MARGIN = 12.0
_BOX_WIDTH, _BOX_HEIGHT = 172.0, 66.0
"""Room for a line with time and memory below the node's name. Pixels."""


def dag_view(graph: Graph) -> dict[str, Any]:
    """``nodes`` and ``labels`` with their boxes [x, y, width, height], and ``edges`` as lists of points, in pixels."""
    scene, bounds = scene_of(graph, box_height=_BOX_HEIGHT, least_width=_BOX_WIDTH)
    left, top = (bounds["min"][axis] - _MARGIN for axis in "xy")

    def place(rect: dict[str, float]) -> list[float]:
        return [round(rect["x"] - left, 1), round(rect["y"] - top, 1), rect["w"], rect["h"]]

    boxes, labels = scene["nodes"][: len(graph.nodes)], scene["nodes"][len(graph.nodes) :]
    return {
        "width": round(bounds["max"]["x"] + _MARGIN - left, 1),
        "height": round(bounds["max"]["y"] + _MARGIN - top, 1),
        "nodes": [
            {
                "name": name,
                "subtitle": subtitle_of(graph, name),
                "executor": executor_of(node) if node.spec is not None else "",
                "skipped": graph.skipped.get(name, ""),
                "box": place(box["rect"]),
            }
            for (name, node), box in zip(graph.nodes.items(), boxes, strict=True)
        ],
        "labels": [
            {"columns": columns, "box": place(label["rect"])}
            for columns, label in zip(arrows_of(graph).values(), labels, strict=True)
        ],
        "edges": [
            {
                "points": [[round(point["x"] - left, 1), round(point["y"] - top, 1)] for point in edge["points"]],
                "arrow": edge["marker_end"]["kind"] != "none",
            }
            for edge in scene["edges"]
        ],
    }
