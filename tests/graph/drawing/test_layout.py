from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.graph.drawing.layout import BOX_HEIGHT, lay_out


@st.composite
def _graphs(draw):
    count = draw(st.integers(1, 8))
    edges = {}
    for end in range(1, count):
        for start in draw(st.sets(st.integers(0, end - 1))):
            edges[f"n{start}", f"n{end}"] = ["column"] * draw(st.integers(1, 4))
    stages = {}
    for index in range(count):
        stages[f"n{index}"] = max((stages[a] + 1 for a, b in edges if b == f"n{index}"), default=0)
    return dict.fromkeys(stages, "what it is"), edges, stages


@settings(max_examples=80, deadline=None)
@given(_graphs())
def test_nothing_overlaps_and_lines_go_down(graph):
    subtitles, edges, stages = graph
    picture = lay_out(subtitles, edges, stages)
    shapes = [(box.x, box.y, box.width, BOX_HEIGHT) for box in picture.boxes]
    shapes += [(label.x, label.y, label.width, label.height) for label in picture.labels]
    assert len(shapes) == len(stages) + len(edges)
    for (x0, y0, w0, h0), (x1, y1, w1, h1) in combinations(shapes, 2):
        assert abs(x0 - x1) >= (w0 + w1) / 2 - 1e-6 or abs(y0 - y1) >= (h0 + h1) / 2 - 1e-6
    for x, y, width, height in shapes:
        assert x - width / 2 >= 0 and x + width / 2 <= picture.width
        assert y - height / 2 >= 0 and y + height / 2 <= picture.height
    for edge in picture.edges:
        heights = [y for _, y in edge.curve()]
        assert heights == sorted(heights)


@settings(max_examples=80, deadline=None)
@given(_graphs())
def test_a_line_meets_its_own_label_in_the_middle_and_nothing_else(graph):
    subtitles, edges, stages = graph
    picture = lay_out(subtitles, edges, stages)
    lines = [_points(edge.curve()) for edge in picture.edges]
    for label in picture.labels:
        crossing = [line for line in lines if any(_is_within(point, label, label.height) for point in line)]
        assert len(crossing) == 1
        assert {x for x, y in crossing[0] if abs(y - label.y) < label.height / 2} == {label.x}
    for box in picture.boxes:
        assert not any(_is_within(point, box, BOX_HEIGHT) for line in lines for point in line)


def _points(curve):
    """The points of a curve and some between each two, as a pen goes through them."""
    parts = [index / 8 for index in range(8)]
    between = [(x0 + (x1 - x0) * t, y0 + (y1 - y0) * t) for (x0, y0), (x1, y1) in pairwise(curve) for t in parts]
    return [*between, curve[-1]]


def _is_within(point, shape, height):
    return abs(point[0] - shape.x) < shape.width / 2 - 1e-6 and abs(point[1] - shape.y) < height / 2 - 1e-6


def test_curves_end_where_the_line_ends():
    picture = lay_out({"a": "", "b": ""}, {("a", "b"): ["column"]}, {"a": 0, "b": 1})
    (edge,) = picture.edges
    curve = edge.curve()
    boxes = {box.name: box for box in picture.boxes}
    assert curve[0] == (boxes["a"].x, boxes["a"].y + BOX_HEIGHT / 2)
    assert curve[-1] == (boxes["b"].x, boxes["b"].y - BOX_HEIGHT / 2)
