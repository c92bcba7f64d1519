"""Sizes that grow with the machines: `prompts_per_node` and `mini_batch_per_node`, multiplied out on loading.

The factor is the `nodes` of the largest group that holds an engine which some node trains: the same file trains with
the same batch for each machine, whatever the number of machines. What the file says counts, not the machines that there
are, so that `dagrl validate` and a run elsewhere find the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Positions
from dagrl.config.loading.yaml_source import Document, Tree

_TRAINING = ("update", "critic", "sft", "dpo")
"""Ops that take mini-batches."""


def multiply_out(document: Document) -> None:
    """Put ``prompts_per_step`` and ``mini_batch`` in place of what is said for each machine."""
    machines = _trained_machines(document.tree)
    for place, section, for_each, in_all in _scaled(document.tree):
        if for_each not in section:
            continue
        value, said = section[for_each], (*place, for_each)
        if in_all in section:
            message = (
                f"the size is given twice, as `{for_each}` and as `{in_all}`; keep one, and take an inherited one away "
                f"with `{in_all}: null`"
            )
            document.problems.append(Positions(document.positions).problem(said, message))
            document.broken.add((*place, in_all))
            del section[for_each]
        elif type(value) is not int or value < 1:
            # The schema says what is wrong with it; that the product is missing follows from that.
            document.broken.add((*place, in_all))
        else:
            section[in_all] = value * machines
            document.positions[(*place, in_all)] = Positions(document.positions).at(said)
            del section[for_each]


def _scaled(tree: Tree) -> Iterator[tuple[Place, Tree, str, str]]:
    """Sections with such a size: where, the section, the size for each machine, the size in all."""
    data = tree.get("data")
    if isinstance(data, dict):
        yield ("data",), data, "prompts_per_node", "prompts_per_step"
    for name, node in _sections(tree, "nodes"):
        if node.get("op") in _TRAINING:
            yield ("nodes", name), node, "mini_batch_per_node", "mini_batch"


def _trained_machines(tree: Tree) -> int:
    """Machines of the largest trained group; 1 where the file is wrong there, which others say."""
    engines, groups = dict(_sections(tree, "engines")), dict(_sections(tree, "groups"))
    found = [1]
    for _, node in _sections(tree, "nodes"):
        if node.get("op") in _TRAINING:
            group = groups.get(_text(engines.get(_text(node.get("engine")), {}).get("group")), {})
            nodes = group.get("nodes", 1)
            found += [nodes] if type(nodes) is int else []
    return max(found)


def _sections(tree: Tree, kind: str) -> Iterator[tuple[str, Tree]]:
    holder = tree.get(kind)
    if isinstance(holder, dict):
        yield from ((name, section) for name, section in holder.items() if isinstance(section, dict))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
