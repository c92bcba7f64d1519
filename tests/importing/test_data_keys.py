"""Files, mixtures, orders and buffers of other frameworks: what pipelines they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dagrl.importing.importer import import_file
from dagrl.importing.parts import data_file, parquet_file
from dagrl.importing.registry import FRAMEWORKS
from dagrl.importing.settings import Setting, Settings, Unresolved
from dagrl.importing.table import Status, translate
from dagrl.validation import check_file

TASKS = "buffer.explorer_input"
DATA_ARGS = "actor_train.data_args"
REPLAY = "buffer.trainer_input.experience_buffer.replay_buffer"


def outcome(framework: str, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Status]]:
    """The keys of the pipeline, and what became of each setting."""
    settings = Settings()
    for line, (key, value) in enumerate(given.items(), start=1):
        settings.add(Setting(key, value, "source", line))
    found = translate(FRAMEWORKS[framework], settings)
    return found.tree, {line.key: line.status for line in found.lines if line.place}


@pytest.mark.parametrize(
    ("files", "train", "status"),
    [
        ("a.parquet", "a.parquet", Status.TRANSLATED),
        (["a.parquet"], "a.parquet", Status.TRANSLATED),
        (["gsm8k/a.parquet", "math/b.parquet"], ["gsm8k/a.parquet", "math/b.parquet"], Status.TRANSLATED),
        (["a.parquet", Unresolved("$B", "$B is not set")], "a.parquet", Status.UNKNOWN),
    ],
)
def test_lists_of_files_stay_lists(files, train, status) -> None:
    tree, statuses = outcome("verl", {"data.train_files": files})
    assert (tree["data.train"], statuses["data.train_files"]) == (train, status)


@pytest.mark.parametrize(
    ("files", "strict"),
    [(["gsm8k/a.parquet", "gsm8k/b.parquet"], True), (["gsm8k/a.parquet", "math/b.parquet"], False)],
)
def test_rewards_are_strict_if_all_files_have_plain_numbers(files, strict) -> None:
    tree, _ = outcome("verl", {"data.train_files": files, "data.val_files": None})
    assert tree.get("nodes.reward.args.strict", False) is strict


def test_verls_samplers_are_named_with_what_takes_their_place() -> None:
    given = {"data.sampler.class_path": "pkg://mine", "data.sampler.class_name": "Curriculum"}
    tree, statuses = outcome("verl", given)
    assert "data.order" not in tree
    assert set(statuses.values()) == {Status.REFUSED}


def test_rolls_domains_with_files_of_their_own_become_sources_with_weights() -> None:
    files = ["data/math_deepmath.jsonl", "data/code_kodcode.jsonl", "data/math_dapo.jsonl"]
    given = {f"{DATA_ARGS}.file_name": files} | {
        f"{DATA_ARGS}.domain_interleave_probs.{name}": weight
        for name, weight in (("math_rule", 0.75), ("code_sandbox", 0.25))
    }
    tree, statuses = outcome("roll", given)
    assert {key: value for key, value in tree.items() if key.startswith("data.train")} == {
        "data.train.math_rule.path": ["data/math_deepmath.parquet", "data/math_dapo.parquet"],
        "data.train.math_rule.weight": 0.75,
        "data.train.code_sandbox.path": "data/code_kodcode.parquet",
        "data.train.code_sandbox.weight": 0.25,
    }
    assert set(statuses.values()) == {Status.TRANSLATED}


@pytest.mark.parametrize(
    ("files", "domains", "status"),
    [
        (["data/all.jsonl"], ["math_rule", "code_sandbox"], Status.REFUSED),
        (["data/math.jsonl", "data/general.jsonl"], ["math_rule", "code_sandbox"], Status.REFUSED),
        (["data/math.jsonl"], ["math_rule"], Status.IMPLIED),
        (["data/all.jsonl"], ["math_rule"], Status.IMPLIED),
    ],
)
def test_domains_that_share_files_keep_the_files(files, domains, status) -> None:
    probs = {f"{DATA_ARGS}.domain_interleave_probs.{name}": 0.5 for name in domains}
    tree, statuses = outcome("roll", {f"{DATA_ARGS}.file_name": files} | probs)
    expected = [file.replace("jsonl", "parquet") for file in files]
    assert tree["data.train"] == (expected if len(expected) > 1 else expected[0])
    assert {statuses[key] for key in probs} == {status}


@pytest.mark.parametrize(
    ("selector", "features", "order", "status"),
    [
        ("random", None, {"data.order": "shuffled"}, Status.TRANSLATED),
        ("sequential", None, {"data.order": "file"}, Status.TRANSLATED),
        ("offline_easy2hard", ["rate", "length"], {"data.order.by": "rate"}, Status.TRANSLATED),
        ("offline_easy2hard", None, {}, Status.REFUSED),
        ("difficulty_based", ["a", "b"], {"data.order.adaptive.band": [0.2, 0.8]}, Status.TRANSLATED),
        ("my_selector", None, {}, Status.REFUSED),
    ],
)
def test_trinitys_selectors_become_orders(selector, features, order, status) -> None:
    prefix = f"{TASKS}.taskset.task_selector"
    given = {f"{TASKS}.taskset.path": "data/a.parquet", f"{prefix}.selector_type": selector}
    if features is not None:
        given[f"{prefix}.feature_keys"] = features
    tree, statuses = outcome("trinity", given)
    assert {key: value for key, value in tree.items() if key.startswith("data.order")} == order
    assert statuses[f"{prefix}.selector_type"] is status


def test_trinitys_task_sets_become_one_source_of_all_files() -> None:
    given = {f"{TASKS}.tasksets.{number}.path": f"data/{number}.parquet" for number in range(3)}
    tree, statuses = outcome("trinity", given)
    assert tree["data.train"] == [f"data/{number}.parquet" for number in range(3)]
    assert set(statuses.values()) == {Status.TRANSLATED}


def test_trinitys_replay_buffer_becomes_a_node_and_the_pipeline_is_valid(sources, tmp_path: Path) -> None:
    text = (sources / "trinity_grpo.yaml").read_text()
    document = yaml.safe_load(text)
    document["buffer"]["trainer_input"]["experience_buffer"]["replay_buffer"] = {
        "enable": True,
        "priority_fn": "linear_decay",
        "reuse_cooldown_time": 30,
        "priority_fn_args": {"decay": 0.1},
    }
    (tmp_path / "trinity.yaml").write_text(yaml.safe_dump(document))
    found = import_file(tmp_path / "trinity.yaml", (), None)
    statuses = {line.key: line.status for line in found.translation.lines}
    assert statuses[f"{REPLAY}.enable"] is statuses[f"{REPLAY}.priority_fn"] is Status.TRANSLATED
    assert statuses[f"{REPLAY}.priority_fn_args.decay"] is Status.REFUSED
    row = {"prompt": "1+1=", "data_source": "a", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row] * 2048), tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    (tmp_path / "pipeline.yaml").write_text(found.text)
    pipeline = check_file(tmp_path / "pipeline.yaml", with_files=False).loaded.pipeline
    assert pipeline.nodes["replay"].groups_per_step == pipeline.data.prompts_per_step
    off = {f"{REPLAY}.enable": False, f"{REPLAY}.priority_fn": "linear_decay"}
    tree, statuses = outcome("trinity", off)
    assert set(statuses.values()) == {Status.IMPLIED} and "nodes.replay.op" not in tree


@pytest.mark.parametrize(
    ("framework", "given", "expected"),
    [
        (
            "slime",
            {"--prompt-data": "dapo.jsonl", "--input-key": "prompt", "--label-key": "label"},
            {"data.train.path": "dapo.jsonl", "data.train.answer_key": "label"},
        ),
        ("slime", {"--prompt-data": "a.jsonl"}, {"data.train.path": "a.jsonl", "data.train.prompt_key": "input"}),
        ("slime", {"--prompt-data": "a.csv", "--input-key": "prompt"}, {"data.train": "a.parquet"}),
        (
            "verl",
            {"data.train_files": ["a.parquet", "b.parquet"], "data.prompt_key": "question"},
            {"data.train.path": ["a.parquet", "b.parquet"], "data.train.prompt_key": "question"},
        ),
        ("verl", {"data.train_files": "a.parquet", "data.prompt_key": "prompt"}, {"data.train": "a.parquet"}),
    ],
)
def test_files_keep_their_format_and_columns(framework, given, expected) -> None:
    tree, _ = outcome(framework, given)
    train = {key: value for key, value in tree.items() if key.startswith("data.train")}
    assert train == expected


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("/data/user@corp/train.parquet", "/data/user@corp/train.parquet"),
        ("/data/user@corp/train.parquet@[0:100]", "/data/user@corp/train.parquet"),
        ("a.jsonl@[:100]", "a.jsonl"),
        ("a@[0:1]/b.jsonl@[-100:]", "a@[0:1]/b.jsonl"),
        ("org/set@main", "org/set@main.parquet"),
        ("a.ndjson", "a.ndjson"),
        ("a.ndjson.gz", "a.ndjson.gz"),
        ("a.feather", "a.feather"),
        ("a.ipc", "a.ipc"),
        ("a.arrow", "a.arrow"),
        ("a.json.gz", "a.json.gz"),
        ("a.parquet.gz", "a.parquet"),
        ("a.csv", "a.parquet"),
        ("a.csv.gz", "a.parquet"),
        ("org/set-v1.5", "org/set-v1.5.parquet"),
        ("org/set/", "org/set.parquet"),
        ("", ""),
    ],
)
def test_files_that_dagrl_reads_keep_their_names_and_others_become_parquet(given, file) -> None:
    assert data_file(given) == file


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json.gz", "a.ndjson", "a.feather", "a.arrow", "a.csv", "a.parquet@[:9]"]
)
def test_files_that_are_converted_have_one_ending(name) -> None:
    assert parquet_file(name) == "a.parquet"


@pytest.mark.parametrize(
    ("file", "note"),
    [
        ("a.parquet", ""),
        ("a.jsonl", ""),
        ("a.csv", "convert it once"),
        ("a.parquet@[0:9]", "all rows are read"),
        ("a.csv@[0:9]", "convert it once (docs/data.md); all rows are read"),
    ],
)
def test_rows_that_a_file_is_cut_to_are_noted(file, note) -> None:
    settings = Settings()
    settings.add(Setting("data.train_files", file, "source", 1))
    (line,) = [each for each in translate(FRAMEWORKS["verl"], settings).lines if each.key == "data.train_files"]
    assert note in line.note and bool(note) == bool(line.note)
