"""`dagrl graph`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import Overrides, Pipeline, parse_path


def graph(
    pipeline: Pipeline,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", parser=parse_path, metavar="FILE", help="write FILE.svg, .png, .mmd (Mermaid) or .txt"
        ),
    ] = None,
) -> int:
    """Draw the DAG that follows from what the nodes read and write: as text, or as a picture with -o."""
    from dagrl.config.loading.loader import load_pipeline
    from dagrl.graph.drawing.draw import draw_text, write_drawing
    from dagrl.graph.inference import build_graph
    from dagrl.graph.plugins.isolation import isolated_imports

    loaded = load_pipeline(pipeline, overrides or [])
    with isolated_imports():
        dag = build_graph(loaded.pipeline, loaded.folder, loaded.positions)
    if output is None:
        print(draw_text(dag), end="")
        return 0
    with exit_on("graph", ValueError, OSError):
        write_drawing(dag, output)
    return 0
