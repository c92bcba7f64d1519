"""The rank of a machine, from the variables of torchrun and Kubeflow."""

from __future__ import annotations

import pytest

from dagrl.launcher.errors import LaunchError
from dagrl.launcher.node_rank import NodeRank, node_rank_from

TWO = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0"}


@pytest.mark.parametrize(
    ("variables", "node_rank"),
    [
        ({}, None),
        ({"PET_NNODES": "1"}, None),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0", "MASTER_ADDR": "x", "PET_NPROC_PER_NODE": "8"}, None),
        ({"PET_NNODES": " ", "PET_NODE_RANK": "0"}, None),
        (TWO, NodeRank(1, 2, 2, "node0", 29500, None)),
        (TWO | {"PET_NNODES": "2:2"}, NodeRank(1, 2, 2, "node0", 29500, None)),
        (TWO | {"PET_NNODES": "2:5"}, NodeRank(1, 5, 2, "node0", 29500, None)),
        (TWO | {"PET_NPROC_PER_NODE": "8", "PET_MASTER_PORT": "29511"}, NodeRank(1, 2, 2, "node0", 29511, 8)),
        (TWO | {"PET_NPROC_PER_NODE": "auto", "MASTER_PORT": "23456"}, NodeRank(1, 2, 2, "node0", 23456, None)),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"},
            NodeRank(0, 2, 2, "10.0.0.1", 29500, None),
        ),
        # Those of torchrun's own name count more than those that other tools set too.
        (
            TWO | {"MASTER_ADDR": "other", "PET_MASTER_PORT": "1", "MASTER_PORT": "2"},
            NodeRank(1, 2, 2, "node0", 1, None),
        ),
    ],
)
def test_node_rank_from_the_variables(variables, node_rank):
    assert node_rank_from(variables) == node_rank


def test_the_first_machine_leads():
    assert [NodeRank(rank, 2, 2, "node0", 29500, None).is_leader for rank in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES is `two`; set it to a whole number of 1 or more"),
        ({"PET_NNODES": "0"}, "PET_NNODES is `0`; set it to a whole number of 1 or more"),
        ({"PET_NNODES": "1_0"}, "PET_NNODES is `1_0`; set it to a whole number of 1 or more"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is `1:4`; a range of machines is MIN:MAX, with 2 or more as MIN"),
        ({"PET_NNODES": "4:2"}, "PET_NNODES is `4:2`; a range of machines is MIN:MAX, with 2 or more as MIN"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK is 3 and PET_NNODES is not set; set it to the number of machines"),
        ({"PET_NNODES": "2"}, "PET_NNODES is 2 and PET_NODE_RANK is not set; number the machines from 0"),
        (TWO | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2 of PET_NNODES=2 machines; number them 0 to 1"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "1"}, "PET_NODE_RANK is 1 of PET_NNODES=1 machines; number them 0 to 0"),
        (TWO | {"PET_NODE_RANK": "-1"}, "PET_NODE_RANK is `-1`; set it to a whole number of 0 or more"),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            "PET_NNODES is 2 and neither PET_MASTER_ADDR nor MASTER_ADDR is set; set it to the address of rank 0",
        ),
        (TWO | {"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT is `70000`; set it to a whole number from 1 to 65535"),
        (TWO | {"MASTER_PORT": "x"}, "MASTER_PORT is `x`; set it to a whole number from 1 to 65535"),
        (TWO | {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is `0`; set it to a whole number of 1 or more"),
    ],
)
def test_a_wrong_variable_is_named_with_what_it_should_be(variables, message):
    with pytest.raises(LaunchError) as caught:
        node_rank_from(variables)
    assert (str(caught.value), caught.value.code) == (message, 2)
