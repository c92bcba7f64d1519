import sys
import xml.etree.ElementTree as ElementTree

import pytest

from dagrl.cli import main


def test_text_lists_stages(pipeline, capsys):
    assert main(["graph", str(pipeline)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stage 0\n  prompts  (the data set)\nstage 1\n  rollout  (rollout on generator)\n")
    assert "  update  (update on actor)\n    prompts -> prompt_tokens\n" in out


def test_needs_no_data(pipeline, capsys):
    (pipeline.parent / "train.parquet").unlink()
    assert main(["graph", str(pipeline)]) == 0


def test_mermaid(pipeline, tmp_path):
    assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.mmd")]) == 0
    lines = (tmp_path / "g.mmd").read_text().splitlines()
    assert lines[0] == "flowchart TD"
    assert '    n_reward -->|"reward"| n_advantage' in lines
    assert '    n_prompts(["<b>prompts</b><br/>the data set"])' in lines


def test_svg_holds_every_node_and_column(pipeline, tmp_path):
    assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.svg")]) == 0
    root = ElementTree.parse(tmp_path / "g.svg").getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in ("prompts", "rollout", "reward", "advantage", "update", "samples", "update on actor"):
        assert texts.count(name) >= 1
    assert texts.count("response_mask") == 2
    lines = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("marker-end")]
    assert len(lines) == 13


def test_png_is_a_picture_of_the_same_shape(pipeline, tmp_path):
    image = pytest.importorskip("PIL.Image")
    assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.png")]) == 0
    assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.svg")]) == 0
    svg = ElementTree.parse(tmp_path / "g.svg").getroot()
    with image.open(tmp_path / "g.png") as picture:
        assert abs(picture.width - 2 * float(svg.get("width"))) <= 4
        # The boxes' fill is there, so something was drawn.
        assert (219, 234, 254) in {colour for _, colour in picture.getcolors(1 << 24)}


def test_png_without_pillow_says_what_to_do(pipeline, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.png")]) == 2
    assert "write an .svg file instead" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "fragment"), [("g.pdf", "end it in .svg"), ("no/g.svg", "there is no folder")])
def test_an_impossible_file_is_one_line(pipeline, tmp_path, capsys, name, fragment):
    assert main(["graph", str(pipeline), "-o", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert fragment in err
    assert err.count("\n") == 1
