"""`dagrl graph`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, Only, Overrides, Pipeline, parse_part, parse_path, print_json


def graph(
    pipeline: Pipeline,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", parser=parse_path, metavar="FILE", help="write FILE.svg, .png, .mmd (Mermaid) or .txt"
        ),
    ] = None,
    only: Only = None,
    as_json: AsJson = False,
) -> int:
    """Draw the DAG that follows from what the nodes read and write: as text, or as a picture with -o.

    Examples:
        dagrl graph pipeline.yaml
        dagrl graph tiny_grpo -o dag.svg
        dagrl graph pipeline.yaml --json
        dagrl graph pipeline.yaml --only rollout,reward
    """
    from dagrl.config.loading.loader import load_pipeline
    from dagrl.graph.cut import PartError, cut
    from dagrl.graph.drawing.draw import as_values, draw_text, write_drawing
    from dagrl.graph.inference import build_graph
    from dagrl.plugins.isolation import isolated_imports

    loaded = load_pipeline(pipeline, overrides or [])
    with isolated_imports():
        dag = build_graph(loaded.pipeline, loaded.folder, loaded.positions)
    if (part := parse_part(only)) is not None:
        with exit_on("graph", PartError):
            dag = cut(dag, loaded.pipeline, part.only).graph
    if as_json:
        print_json(as_values(dag))
    elif output is None:
        print(draw_text(dag), end="")
    if output is not None:
        with exit_on("graph", ValueError, OSError):
            write_drawing(dag, output)
    return 0
