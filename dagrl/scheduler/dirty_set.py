"""Who shares devices, or weights, with whom, and where something has happened."""

from __future__ import annotations

import networkx as nx

from dagrl.scheduler.plan import Plan


class Neighbourhoods:
    """Executors in sets: what happens to one may let another of its set begin something, by its devices or weights."""

    def __init__(self, plan: Plan) -> None:
        """All is new to begin with."""
        graph = nx.Graph()
        graph.add_nodes_from(plan.executors)
        for name, executor in plan.executors.items():
            if executor.group is not None:
                graph.add_edge(name, ("group", executor.group))
            if executor.weights_from is not None:
                graph.add_edge(name, executor.weights_from)
        sets = nx.connected_components(graph)
        self._sets = [tuple(name for name in plan.executors if name in members) for members in sets]
        self._place_of = {name: place for place, names in enumerate(self._sets) for name in names}
        self._touched = set(self._place_of.values())

    def touch(self, *executors: str) -> None:
        """Something has happened to these: one is free, has work or other weights."""
        for name in executors:
            self._touched.add(self._place_of[name])

    def take_touched(self) -> list[str]:
        """The executors that may be able to begin what they could not when this was last asked."""
        touched = [name for place in sorted(self._touched) for name in self._sets[place]]
        self._touched.clear()
        return touched
