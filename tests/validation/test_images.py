"""Pipelines with images: what `dagrl validate` refuses."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from dagrl.backends.hf.section import HfEngineSpec
from dagrl.config.errors import PipelineError
from dagrl.config.schema import Pipeline
from dagrl.graph.inference import build_graph
from dagrl.validation import check_file

TEMPLATE = Path(__file__).parents[2] / "dag_templates" / "tiny_images.yaml"

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
DEEP = {
    "model.init.model_type": "qwen3_vl",
    "model.init.head_dim": 16,
    "model.init.rope_parameters.mrope_interleaved": True,
    "model.init.vision_config": {
        "depth": 2,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 8,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
"""A tower that adds to two layers."""
JUDGE = {"op": "judge", "engine": "judge", "prompt": "{prompt}{response}", "images": True, "max_prompt_tokens": 32}
JUDGE |= {"sampling": {"max_new_tokens": 4}}
TEXT_JUDGE = {
    "backend": "hf",
    "group": "rollout",
    "model": {"init": TEXT, "tokenizer": {"kind": "characters", "alphabet": "0123456789="}},
}


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format="PNG")
    return file.getvalue()


def write(path: Path, prompt: str, images: Any, kind: pa.DataType | None = None) -> None:
    row = {"prompt": [{"role": "user", "content": prompt}], "data_source": "d", "reward_model": {"ground_truth": "1"}}
    table = pa.Table.from_pylist([row] * 3)
    good = [{"bytes": png(), "path": None}]
    column = pa.array([good, images, good], kind or pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})))
    pq.write_table(table.append_column("images", column), path)


@pytest.fixture
def problems(tmp_path: Path):
    """``problems(changes, ...)``: place and message of each problem of the template, changed at dotted places."""

    def check(changes: dict[str, Any], prompt: str = "<image>=", images: Any = None) -> list[tuple[str, str]]:
        tree = yaml.safe_load(TEMPLATE.read_text())
        tree["data"] |= {"train": str(tmp_path / "train.parquet"), "val": str(tmp_path / "train.parquet")}
        write(tmp_path / "train.parquet", prompt, [{"bytes": png(), "path": None}] if images is None else images)
        for place, value in changes.items():
            *path, last = place.split(".")
            at = tree
            for key in path:
                at = at[key]
            at[last] = value
        file = tmp_path / "pipeline.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        try:
            check_file(file)
        except PipelineError as error:
            return [(each.place, each.message) for each in error.problems]
        return []

    return check


def test_the_template_is_right(problems) -> None:
    assert problems({}) == []


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"data.image_key": None}, "data.min_pixels", "without `image_key`"),
        ({"data.image_key": "pictures"}, "data.train", "no list of images in `pictures`"),
        ({"data.overlong_prompts": "cut"}, "data.overlong_prompts", "would go through images"),
        ({"data.max_pixels": 128}, "data.min_pixels", "more than max_pixels"),
        ({"model.tokenizer.images": False}, "model.tokenizer", "no token for images"),
        ({"model.init": TEXT}, "data.image_key", "a qwen2 reads text"),
        ({"model.init": TEXT, "engines.actor.freeze": ["vision"]}, "engines.actor.freeze", "no vision tower"),
        ({"nodes.reward": {**JUDGE, "prompt": "{response}"}}, "nodes.reward.prompt", "which the question needs once"),
        ({"nodes.reward": JUDGE, "engines.judge": TEXT_JUDGE}, "nodes.reward.images", "a qwen2, which reads text"),
        ({"nodes.reward": JUDGE, "data.image_key": None}, "nodes.reward.images", "prompts have no images"),
        (
            {
                "engines.teacher": {"backend": "megatron", "group": "train", "model": {"init": TEXT}},
                "nodes.teacher": {"op": "logprob", "engine": "teacher", "write": "teacher_logprob"},
                "nodes.update.loss": {"distillation": {}},
            },
            "nodes.teacher.engine",
            "`teacher` is a qwen2, which reads text",
        ),
        ({"model.init.rope_parameters": {"rope_theta": 1e4}}, "model.init", "has no mrope_section"),
        ({"model.init.rope_parameters.mrope_section": [2, 2, 2]}, "model.init", "adds up to 6, and half a head has 8"),
        (
            {
                **DEEP,
                "groups.rollout": {"gpus_per_node": 1},
                "engines.generator": {"backend": "sglang", "group": "rollout", "weights_from": "actor"},
            },
            "engines.generator.backend",
            "images of qwen3_vl are not tested with SGLang",
        ),
        ({**DEEP, "model.init.rope_parameters.mrope_interleaved": False}, "model.init", "which servers read"),
        (
            {**DEEP, "engines.actor.transformer": {"recompute_granularity": "full"}},
            "engines.actor.transformer.recompute_granularity",
            "adds to the outputs of layers",
        ),
        (
            {**DEEP, "engines.actor.parallel": {"pipeline_model_parallel_size": 2}},
            "engines.actor.parallel",
            "has 1 layers, and the tower of qwen3_vl adds to the outputs of 2",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(problems, changes: dict[str, Any], place: str, words: str) -> None:
    found = problems(changes)
    assert any(where == place and words in message for where, message in found), found


@pytest.mark.parametrize("agent", [None, {"command": ["python", "agent.py"]}])
def test_readers_get_the_images_of_the_prompts_that_they_read(agent) -> None:
    """Where an agent shows others, a judge still is shown those of the data set, whose messages it reads."""
    tree = yaml.safe_load(TEMPLATE.read_text())
    tree["nodes"]["rollout"]["agent"] = agent
    judge = {"endpoint": "http://127.0.0.1:1/v1", "model": "m"}
    tree["nodes"]["reward"] = {"op": "judge", "prompt": "{prompt}{response}", "images": True, **judge}
    nodes = build_graph(Pipeline.model_validate(tree)).nodes
    assert {nodes[name].inputs["pixel_values"].node for name in ("rollout", "reward")} == {"prompts"}
    shown = {nodes["update"].inputs["pixel_values"].node, nodes["samples"].inputs["image_names"].node}
    assert shown == {"rollout" if agent else "prompts"}


def test_a_backend_that_takes_no_images_is_refused(problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfEngineSpec, "takes_images", False)
    ((place, message),) = problems({})
    assert place == "engines.generator.backend"
    assert message.startswith("backend hf takes no images; use one that does, as `actor` does")


def test_sglang_sees_on_gpus_only(problems) -> None:
    generator = {"backend": "sglang", "group": "rollout", "weights_from": "actor"}
    ((place, message),) = problems({"engines.generator": generator})
    assert place == "engines.generator.backend" and "use GPUs, or backend: hf" in message
    on_gpus = {"engines.generator": generator, "groups.rollout": {"gpus_per_node": 1}}
    assert problems(on_gpus) == []


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        ("<image>=", [], "another number of <image> than of images in row 1"),
        ("<image>=", [{"bytes": b"x", "path": None}], "a wrong image (its bytes cannot be decoded"),
        ("<image>=", [{"bytes": None, "path": "gone.png"}], "a wrong image (there is no file"),
        ("=", None, "another number of <image> than of images in row 0 (the first is 0), and 2 more like it"),
    ],
)
def test_wrong_rows_are_named(problems, prompt: str, images: Any, words: str) -> None:
    found = problems({}, prompt, images)
    assert {where for where, _ in found} == {"data.train", "data.val"}
    assert all(words in message for _, message in found)
