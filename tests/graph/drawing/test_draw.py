"""Pictures of pipelines: what is on them, and that nothing covers anything else."""

import re
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.dag import Graph
from dagrl.graph.drawing.draw import draw_svg, write_drawing
from dagrl.graph.inference import build_graph
from dagrl.plugins.isolation import isolated_imports

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
SVG = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]


@pytest.fixture(params=["tiny_grpo", "ppo", "dapo", "multi_agent", "qwen3_8b_megatron"])
def graph(request) -> Graph:
    loaded = load_pipeline(TEMPLATES / f"{request.param}.yaml")
    with isolated_imports():
        return build_graph(loaded.pipeline, loaded.folder, loaded.positions)


def rectangles(picture: ElementTree.Element) -> list[Rectangle]:
    """Boxes and labels, as left, top, right and bottom."""
    (nodes,) = (group for group in picture.iter(f"{SVG}g") if group.get("id") == "nodes")
    found = []
    for rect in nodes.iter(f"{SVG}rect"):
        left, top, width, height = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        # The SVG has two decimals.
        found.append((left + 0.01, top + 0.01, left + width - 0.01, top + height - 0.01))
    return found


def points(path: str) -> list[tuple[float, float]]:
    """The points of a path of straight lines, round corners and arcs, without the radii of arcs."""
    return [tuple(map(float, word.split(","))) for word in re.sub(r"A \S+", "", path).split() if "," in word]


def test_boxes_and_labels_do_not_overlap(graph: Graph) -> None:
    found = rectangles(ElementTree.fromstring(draw_svg(graph)))
    arrows = {*graph.edges, *((graph.filter, name) for name in graph.select_from if graph.filter)}
    assert len(found) == len(graph.nodes) + len(arrows)
    for (left, top, right, bottom), (left2, top2, right2, bottom2) in combinations(found, 2):
        assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top


def test_no_line_crosses_a_box_or_a_label(graph: Graph) -> None:
    picture = ElementTree.fromstring(draw_svg(graph))
    lines = [points(path.get("d", "")) for path in picture.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert lines
    for line in lines:
        for (x0, y0), (x1, y1) in pairwise(line):
            # Corners are at most some pixels wide: a segment is its bounding box.
            left, right, top, bottom = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
            for left2, top2, right2, bottom2 in rectangles(picture):
                assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top


def test_texts_fit_into_the_picture_and_name_all_nodes_and_columns(graph: Graph) -> None:
    picture = ElementTree.fromstring(draw_svg(graph))
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert {*graph.nodes, *(column for columns in graph.edges.values() for column in columns)} <= set(texts)
    left, top, width, height = map(float, picture.get("viewBox", "").split())
    for left2, top2, right2, bottom2 in rectangles(picture):
        assert left <= left2 and top <= top2 and right2 <= left + width and bottom2 <= top + height


def test_a_picture_is_the_same_each_time(graph: Graph, tmp_path: Path) -> None:
    assert draw_svg(graph) == draw_svg(graph)
    for name in ("a.png", "b.png"):
        write_drawing(graph, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
