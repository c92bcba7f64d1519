"""The graph of a run, for commands that read its folder: they import none of the modules that its pipeline names."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from dagrl.config.loading.loader import LoadedPipeline
from dagrl.config.schema import OpContract
from dagrl.graph.dag import Graph
from dagrl.graph.inference import build_graph

CONTRACTS = ".contracts.json"
"""The file with the contracts of nodes that name functions of the user."""
_FORM = TypeAdapter(dict[str, OpContract])


def contracts_text(graph: Graph) -> str:
    """The content of the file for a run with this graph."""
    own = {name: node.contract for name, node in graph.nodes.items() if node.spec and node.spec.user_function}
    return _FORM.dump_json(own).decode()


def graph_of_run(folder: Path, loaded: LoadedPipeline) -> Graph:
    """The graph of the run in `folder`. PipelineError if it is wrong, or a contract is not recorded."""
    try:
        recorded = _FORM.validate_json((folder / CONTRACTS).read_bytes())
    except (OSError, ValueError):  # of an earlier version, or changed by hand
        recorded = {}
    return build_graph(loaded.pipeline, None, loaded.positions, recorded)
