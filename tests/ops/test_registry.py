"""Ops by their names."""

from __future__ import annotations

from typing import get_args

import pytest

from dagrl.config.schema import AdvantageNode, LogprobNode, RewardNode, RolloutNode, UpdateNode
from dagrl.ops.registry import load_op

DECLARED = [
    get_args(node.model_fields["op"].annotation)[0]
    for node in (RolloutNode, RewardNode, LogprobNode, AdvantageNode, UpdateNode)
]


@pytest.mark.parametrize("name", ["prompts", *DECLARED, "samples"])
def test_each_op_that_a_pipeline_can_name_is_there(name: str) -> None:
    op = load_op(name, None)
    assert (op.__module__, op.__name__) == (f"dagrl.ops.{name}", name)


def test_a_users_op_is_found_beside_the_pipeline(bench) -> None:
    module = "import dagrl\n\n@dagrl.node(reads=[], writes=[])\ndef nothing(batch):\n    return {}\n"
    bench.write_module("ops_beside", module)
    assert callable(load_op("ops_beside:nothing", bench.folder))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such_ops:run", r"there is no module 'no_such_ops'.*beside the pipeline file"),
        ("ops_bare:bare", r"`ops_bare:bare` does not say its columns"),
        ("ops_bare:gone", r"module 'ops_bare' has no function 'gone'"),
    ],
)
def test_a_users_op_that_cannot_be_used_is_refused(bench, place: str, message: str) -> None:
    bench.write_module("ops_bare", "def bare(batch):\n    return {}\n")
    with pytest.raises(ValueError, match=message):
        load_op(place, bench.folder)
