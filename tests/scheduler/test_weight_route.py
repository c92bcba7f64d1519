"""The way of new weights follows from the groups, unless the file says it."""

from typing import Any

import pytest

from dagrl.config.schema import Pipeline
from dagrl.scheduler.weight_route import weight_route

MIB = 2**20


def pipeline(generator: dict[str, Any], **groups: Any) -> Pipeline:
    sampling = {"max_new_tokens": 4}
    return Pipeline.model_validate(
        {
            "name": "test",
            "model": {"init": {"model_type": "qwen3"}},
            "data": {"train": "t.parquet", "prompts_per_step": 1, "max_prompt_tokens": 4},
            "groups": groups,
            "engines": {
                "actor": {"backend": "megatron", "group": "train"},
                "generator": {"weights_from": "actor", "group": "train", **generator},
            },
            "nodes": {"rollout": {"op": "rollout", "engine": "generator", "sampling": sampling}},
            "run": {"steps": 1},
        }
    )


SGLANG = {"backend": "sglang"}
APART = {"backend": "sglang", "group": "rollout"}
GPUS, CPUS = {"gpus_per_node": 2}, {"cpus_per_node": 2}


@pytest.mark.parametrize(
    ("generator", "groups", "way"),
    [
        (SGLANG, {"train": GPUS}, "cuda_ipc"),
        (APART, {"train": GPUS, "rollout": GPUS}, "broadcast"),
        (SGLANG, {"train": CPUS}, "object_store"),
        (APART, {"train": CPUS, "rollout": CPUS}, "object_store"),
        (APART, {"train": CPUS, "rollout": GPUS}, "object_store"),
        (APART, {"train": GPUS, "rollout": CPUS}, "object_store"),
        ({"backend": "hf"}, {"train": GPUS}, "object_store"),
        (SGLANG | {"weight_sync": {"route": "object_store"}}, {"train": GPUS}, "object_store"),
        (SGLANG | {"weight_sync": {"route": "cuda_ipc"}}, {"train": CPUS}, "cuda_ipc"),
        (APART | {"weight_sync": {"route": "broadcast"}}, {"train": CPUS, "rollout": CPUS}, "broadcast"),
    ],
)
def test_the_groups_say_the_way(generator, groups, way):
    assert weight_route(pipeline(generator, **groups), "generator").way == way


def test_the_file_sets_the_other_options():
    route = weight_route(pipeline(SGLANG, train=GPUS), "generator")
    assert (route.bucket_bytes, route.passes, route.waves) == (256 * MIB, 1, ((0, 1),))
    asked = SGLANG | {"weight_sync": {"bucket_mib": 64, "checksum": True}}
    route = weight_route(pipeline(asked, train=GPUS), "generator")
    assert (route.bucket_bytes, route.passes) == (64 * MIB, 2)


def test_bucket_memory_is_kept_if_no_other_engine_needs_it():
    assert weight_route(pipeline(APART, train=GPUS, rollout=GPUS), "generator").keep_buffers
    assert not weight_route(pipeline(SGLANG, train=GPUS), "generator").keep_buffers
    assert weight_route(pipeline(SGLANG | {"sleep": False}, train=GPUS), "generator").keep_buffers


def test_stages_of_servers_take_weights_one_after_the_other():
    generator = APART | {"server": {"tp_size": 2, "pp_size": 2}}
    route = weight_route(pipeline(generator, train=GPUS, rollout={"gpus_per_node": 8}), "generator")
    assert route.waves == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_copies_of_attention_are_in_one_wave():
    generator = APART | {"server": {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}}
    route = weight_route(pipeline(generator, train=GPUS, rollout={"gpus_per_node": 4}), "generator")
    assert route.waves == ((0, 1, 2, 3),)
