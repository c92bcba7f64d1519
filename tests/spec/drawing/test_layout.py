from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from dagrl.spec.drawing.layout import BOX_HEIGHT, lay_out


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


def test_curves_end_where_the_line_ends():
    picture = lay_out({"a": "", "b": ""}, {("a", "b"): ["column"]}, {"a": 0, "b": 1})
    (edge,) = picture.edges
    curve = edge.curve()
    boxes = {box.name: box for box in picture.boxes}
    assert curve[0] == (boxes["a"].x, boxes["a"].y + BOX_HEIGHT / 2)
    assert curve[-1] == (boxes["b"].x, boxes["b"].y - BOX_HEIGHT / 2)
