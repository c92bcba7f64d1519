"""Ops by their names."""

from __future__ import annotations

from typing import get_args

import pytest

from dagrl.config.schema import CustomNode, NodeSpec
from dagrl.ops.custom import load_op

DECLARED = [each.__metadata__[0].tag for each in get_args(get_args(NodeSpec)[0]) if get_args(each)[0] is not CustomNode]


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
        ("ops_bare:bare", r"`ops_bare:bare` does not declare its columns"),
        ("ops_bare:gone", r"module 'ops_bare' has no function 'gone'"),
    ],
)
def test_a_users_op_that_cannot_be_used_is_refused(bench, place: str, message: str) -> None:
    bench.write_module("ops_bare", "def bare(batch):\n    return {}\n")
    with pytest.raises(ValueError, match=message):
        load_op(place, bench.folder)
