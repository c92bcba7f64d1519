"""Imports files like each framework's examples, counts the outcomes of their settings, and validates the pipelines."""

import itertools
import json
import re
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dagrl.importing import engines, report
from dagrl.importing.importer import import_file
from dagrl.importing.settings import ImportProblem
from dagrl.importing.table import Status
from dagrl.validation import check_file
from dagrl.validation.data_files import check_data_files

ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "gsm8k",
    "reward_model": {"ground_truth": "2"},
    "label": "2",
}
# File -> settings translated, defaults written out, implied, refused, unknown.
COUNTS = {
    "verl_grpo_megatron.sh": (41, 5, 18, 1, 2),
    "verl_grpo_fsdp.sh": (31, 7, 10, 1, 1),
    "verl_ppo.sh": (42, 16, 7, 1, 0),
    "verl_multi_turn.sh": (18, 16, 2, 4, 0),
    "verl_distillation.sh": (16, 13, 11, 0, 0),
    "siirl_dapo.sh": (33, 7, 6, 0, 1),
    "slime_grpo.sh": (45, 2, 23, 1, 1),
    "slime_async.sh": (30, 4, 3, 0, 0),
    "roll_rlvr.yaml": (48, 7, 28, 3, 1),
    "roll_async.yaml": (41, 4, 2, 0, 0),
    "roll_distillation.yaml": (26, 8, 12, 0, 0),
    "trinity_grpo.yaml": (33, 14, 11, 0, 1),
    "trinity_ppo.yaml": (25, 10, 6, 0, 1),
}
VARIABLES = {"slime_async.sh": {"MODEL_PATH": "Qwen/Qwen3-4B"}}


@pytest.fixture
def folder(tmp_path, sources):
    """A folder with the data files and the reward that the sources name."""
    table = pa.Table.from_pylist([ROW] * 2048)
    for text in re.findall(r"data/[\w/.-]+\.(?:parquet|jsonl)", "".join(f.read_text() for f in sources.glob("*.*"))):
        path = (tmp_path / text).with_suffix(".parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
        if text.endswith(".jsonl"):
            (tmp_path / text).write_text(f"{json.dumps(ROW)}\n" * len(table))
    for name in ("train", "test"):
        (tmp_path / "data" / "gsm8k").mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    shutil.copy(sources / "my_math.py", tmp_path)
    return tmp_path


def imported(sources, folder, name, *arguments):
    return import_file(sources / name, arguments, VARIABLES.get(name))


@pytest.mark.parametrize("name", COUNTS)
def test_settings_are_counted_and_the_pipeline_is_valid(name, sources, folder, monkeypatch):
    monkeypatch.setattr(engines, "made_environments", dict)
    found = imported(sources, folder, name)
    assert tuple(report.counts(found.translation).values()) == COUNTS[name]
    assert found.remarks == ()
    places = [line.place for line in found.translation.lines if line.place]
    assert all(re.search(r":\d+$", place) for place in places)
    path = folder / "pipeline.yaml"
    path.write_text(found.text)
    checked = check_file(path, with_files=False)
    from dagrl.config.loading.positions import Findings

    findings = Findings(checked.loaded.positions)
    sources = checked.loaded.pipeline.data.by_key
    here = {key for key, each in sources.items() if all(path.is_relative_to(folder) for path in each.paths)}
    rows = check_data_files(checked.loaded.pipeline, checked.graph, folder, findings)
    assert {key: rows.get(key) for key in here} == dict.fromkeys(here, 2048)


def test_every_setting_has_one_outcome(sources, folder):
    for name in COUNTS:
        found = imported(sources, folder, name).translation
        keys = [line.key for line in found.lines if line.place]
        assert sorted(keys) == sorted(setting.key for setting in found.settings), name


def test_each_value_names_its_source(sources, folder):
    text = imported(sources, folder, "verl_grpo_fsdp.sh").text
    assert "  prompts_per_step: 1024" in text
    assert re.search(r"n: 5 +# verl_grpo_fsdp.sh:36 actor_rollout_ref.rollout.n\n", text)
    assert re.search(r"dual_clip: 3.0 +# default of verl 0.9\n", text)


def test_a_pipeline_of_verl(sources, folder):
    tree = yaml.safe_load(imported(sources, folder, "verl_grpo_megatron.sh").text)
    assert tree["data"]["val"] == {"gsm8k": "data/gsm8k/test.parquet", "math500": "data/math500/test.parquet"}
    assert tree["engines"]["actor"]["parallel"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    assert tree["engines"]["actor"]["extra"] == {"transformer": {"masked_softmax_fusion": True}}
    assert tree["engines"]["generator"]["server"] == {
        "tp_size": 2,
        "mem_fraction_static": 0.7,
        "attention_backend": "fa3",
    }
    assert tree["nodes"]["update"]["tokens_per_micro_batch"] == (1024 + 2048) * 4
    assert tree["nodes"]["rollout"]["val_sampling"] == {"temperature": 0.6, "max_new_tokens": 2048}
    assert tree["run"]["epochs"] == 15
    assert tree["track"] == ["console", {"tracker": "wandb", "project": "verl_grpo"}]


def test_arguments_of_the_script_come_last(sources, folder):
    found = imported(sources, folder, "verl_grpo_megatron.sh", "actor_rollout_ref.rollout.n=16", "~trainer.test_freq")
    assert found.translation.tree["nodes.rollout.n"] == 16
    assert "run.validate_every" not in found.translation.tree


def test_variables_choose_branches(sources, folder):
    found = import_file(
        sources / "verl_grpo_megatron.sh",
        (),
        {"INFER_BACKEND": "vllm", "MCORE_PATH": "/ckpt"},
    )
    tree = found.translation.tree
    assert tree["engines.generator.backend"] == "vllm"
    assert tree["engines.generator.server.enforce_eager"] is False
    assert tree["engines.actor.dist_checkpointing_path"] == "/ckpt"


def test_an_unset_variable_is_named(sources, folder):
    found = import_file(sources / "slime_async.sh")
    (line,) = [line for line in found.translation.lines if line.key == "--hf-checkpoint"]
    assert line.status == "unknown"
    assert "--set MODEL_PATH=" in line.note


def test_words_that_may_hold_settings_are_remarked(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo $MORE $1 $(cat x) trainer.nnodes=$2\n")
    result = import_file(script, ["trainer.seed=3"])
    assert [each.message for each in result.remarks] == [
        "$MORE may hold settings, which are missing: the script does not set MORE; give --set MORE=VALUE",
        "$(cat) may hold settings, which are missing: is the output of $(cat), which an import does not execute",
    ]
    (line,) = [line for line in result.translation.lines if line.key == "trainer.nnodes"]
    assert "from its call; give its arguments after its name" in line.note
    assert result.translation.tree["run.seed"] == 3

    script.write_text("python train.py --rollout-batch-size 32 $MORE --num-rollout 9 --eval-prompt-data a b.jsonl\n")
    result = import_file(script)
    assert result.translation.tree["data.prompts_per_step"] == 32
    assert ["$MORE may hold" in each.message for each in result.remarks] == [True]


def test_a_field_that_the_library_lacks_is_refused(translated):
    prefix = "actor_rollout_ref.rollout"
    fields = {f"{prefix}.engine_kwargs.sglang.{name}": 1 for name in ("schedule_conservativeness", "no_such_field")}
    tree = translated("verl", {f"{prefix}.name": "sglang", **fields})
    written = {key: value for key, value in tree.items() if key.startswith("engines.generator.extra")}
    assert written == {"engines.generator.extra.server.schedule_conservativeness": 1}


def test_secrets_are_not_printed(sources, folder):
    for name in ("roll_rlvr.yaml", "slime_grpo.sh"):
        found = import_file(sources / name, (), {"WANDB_KEY": "not-a-real-key-0123456789"})
        said = report.as_text(found.translation, ()) + found.text + str(report.as_object(found.translation, ()))
        assert "***" in said
        assert "not-a-real-key" not in said


def test_files_of_other_programs_are_refused(tmp_path):
    for name, text, said in (
        ("a.sh", "python train_my_model.py --lr 3\n", "no call of"),
        ("b.sh", "if true; then\n", "b.sh:2: is not bash"),
        ("c.yaml", "model: 3\n", "no known framework"),
        ("d.yaml", "a: [1\n", "is not YAML"),
        ("e.yaml", "- 1\n", "is not a mapping"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ImportProblem, match=said):
            import_file(tmp_path / name)


def test_interpolations_are_resolved_from_the_inside(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "data: {max_prompt_length: 7, max_response_length: '${oc.select:a.b,${.max_prompt_length}}'}\n"
        "actor_rollout_ref: {rollout: {n: '${oc.env:N,3}', seed: '${actor_rollout_ref.rollout.seed}'}}\n"
    )
    tree = import_file(tmp_path / "c.yaml", ["data.train_batch_size=16"], {"N": "5"}).translation.tree
    assert tree["nodes.rollout.sampling.max_new_tokens"] == 7
    assert (tree["nodes.rollout.n"], tree["data.prompts_per_step"]) == (5, 16)


def test_a_list_with_an_unknown_value_is_unknown(tmp_path):
    config = tmp_path / "grpo.yaml"
    config.write_text("actor_rollout_ref: {}\ntrainer: {logger: [console, '${oc.env:TRACKER}'], seed: 3}\n")
    result = import_file(config)
    assert result.translation.tree["track"] == ["console"]
    assert "give --set TRACKER=VALUE" in report.as_text(result.translation, result.remarks)

    loss = "actor_rollout_ref.actor.policy_loss"
    script = tmp_path / "run.sh"
    script.write_text(f"python -m verl.trainer.main_ppo {loss}.loss_mode=clip_cov {loss}.clip_cov_lb=$LOW\n")
    assert "nodes.held.between" not in import_file(script).translation.tree
    assert import_file(script, variables={"LOW": "2"}).translation.tree["nodes.held.between"] == [2, 5.0]


def test_mappings_are_settings_of_their_section(tmp_path):
    script = tmp_path / "run.sh"
    megatron = "actor_rollout_ref.actor.megatron"
    script.write_text(
        f"python -m verl.trainer.main_ppo model_engine=megatron '{megatron}={{tensor_model_parallel_size: 4}}' "
        f"'+{megatron}.override_transformer_config={{recompute_granularity: full}}' data.custom_cls={{}}\n"
    )
    tree = import_file(script).translation.tree
    assert tree["engines.actor.parallel.tensor_model_parallel_size"] == 4
    assert tree["engines.actor.transformer.recompute_granularity"] == "full"

    config = tmp_path / "grpo.yaml"
    config.write_text("usual: &usual {n: 4, temperature: 0.5}\nactor_rollout_ref: {rollout: {n: 8, <<: *usual}}\n")
    tree = import_file(config).translation.tree
    assert (tree["nodes.rollout.n"], tree["nodes.rollout.sampling.temperature"]) == (8, 0.5)


def test_a_trainer_of_trinity_alone_has_the_prompts_of_its_samples(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "mode: train\nalgorithm: {algorithm_type: grpo, repeat_times: 4}\nbuffer: {train_batch_size: 64}\n"
        "synchronizer: {sync_interval: 2}\n"
    )
    tree = import_file(tmp_path / "t.yaml", framework="trinity").translation.tree
    assert (tree["nodes.update.mini_batch"], tree["data.prompts_per_step"], tree["nodes.rollout.n"]) == (16, 32, 4)


def test_a_batch_of_requests_is_no_mini_batch_of_trinity(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "algorithm: {algorithm_type: grpo, repeat_times: 4}\nbuffer: {batch_size: 8, train_batch_size: 640,"
        " explorer_input: {taskset: {default_workflow_type: math_workflow}}}\n"
    )
    found = import_file(tmp_path / "t.yaml", framework="trinity").translation
    assert (found.tree["nodes.update.mini_batch"], found.tree["nodes.reward.fn"]) == (8, "math")
    statuses = {line.key: line.status for line in found.lines}
    assert statuses["buffer.train_batch_size"] == Status.REFUSED
    assert statuses["buffer.explorer_input.taskset.default_workflow_type"] == Status.TRANSLATED
    assert "buffer.explorer_input.default_workflow_type" not in statuses


def test_the_older_switch_of_verl_for_gpg(tmp_path):
    (tmp_path / "v.sh").write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_gpg_loss=True\n")
    tree = import_file(tmp_path / "v.sh").translation.tree
    assert tree["nodes.update.loss.policy"] == "reinforce"
    assert not [key for key in tree if "clip" in key], "validate refuses them"


@pytest.mark.parametrize(
    ("given", "rank"),
    [("lora_adapter_path=a lora_rank=8", 8), ("lora.adapter_path=a lora.rank=8", 8), ("lora_adapter_path=a", None)],
)
def test_a_folder_of_adapters_of_verl(given, rank, tmp_path):
    settings = " ".join(f"actor_rollout_ref.model.{each}" for each in given.split())
    (tmp_path / "v.sh").write_text(f"python3 -m verl.trainer.main_ppo {settings}\n")
    found = import_file(tmp_path / "v.sh").translation
    assert found.tree["engines.actor.lora.path"] == "a"
    assert found.tree.get("engines.actor.lora.rank") == rank
    unknown = [line for line in found.lines if line.status is Status.UNKNOWN and "lora" in line.key]
    assert [line.targets for line in unknown] == ([] if rank else [("engines.actor.lora.rank",)])


@pytest.mark.parametrize(("given", "tokens"), [(100, 768), (1000, 1000)])
def test_micro_batches_of_slime_hold_the_longest_sample(given, tokens, tmp_path):
    (tmp_path / "s.sh").write_text(
        "python3 train.py --hf-checkpoint m --prompt-data d.parquet --rollout-max-response-len 512"
        f" --rollout-max-prompt-len 256 --use-dynamic-batch-size --max-tokens-per-gpu {given}\n"
    )
    tree = import_file(tmp_path / "s.sh").translation.tree
    assert tree["nodes.update.tokens_per_micro_batch"] == tokens


@pytest.mark.parametrize(("given", "written"), [("'</answer>'", ["</answer>"]), ("'</a>' Q:", ["</a>", "Q:"])])
def test_stop_strings_of_slime(given, written, tmp_path):
    (tmp_path / "s.sh").write_text(f"python3 train.py --hf-checkpoint m --prompt-data d --rollout-stop {given}\n")
    assert import_file(tmp_path / "s.sh").translation.tree["nodes.rollout.sampling.stop"] == written


@pytest.mark.parametrize(
    ("model", "key"), [("Qwen/Qwen2.5-VL-7B-Instruct", "images"), ("m/vl_7B", None), ("Qwen/Qwen3-8B", None)]
)
def test_a_model_of_verl_that_sees_gets_the_images_of_the_data(model, key, tmp_path):
    path = tmp_path / "v.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo data.train_files=d actor_rollout_ref.model.path={model} $@\n")
    assert import_file(path).translation.tree.get("data.image_key") == key
    given = import_file(path, ["data.image_key=pictures"]).translation.tree
    assert given["data.image_key"] == "pictures"


WRONG: list[Any] = [[1, 2], {"a": 1}, "many", 0]


@pytest.mark.parametrize("name", [name for name in COUNTS if name.endswith(".yaml")])
def test_a_value_of_another_type_is_a_line_of_the_report(name, sources, tmp_path):
    """Every third scalar of the file in turn is replaced, by one of the wrong values."""
    tree = yaml.safe_load((sources / name).read_text())
    path = tmp_path / name
    for (section, key), wrong in zip([*_scalars(tree)][::3], itertools.cycle(WRONG), strict=False):
        right, section[key] = section[key], wrong
        path.write_text(yaml.safe_dump(tree))
        found = import_file(path, framework=name.split("_")[0])
        section[key] = right
        assert len(found.translation.lines) > 10
        for line in found.translation.lines:
            assert line.status is not Status.UNKNOWN or line.note


def _scalars(tree):
    """Yield the mapping and the key of each scalar."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _scalars(value)
        elif not isinstance(value, list):
            yield tree, key
