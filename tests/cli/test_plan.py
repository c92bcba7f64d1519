import json
import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.cli import main

LARGE = "groups.all={gpus_per_node: 2, gpu: H200}"


def test_says_what_a_run_will_take(pipeline, capsys):
    assert main(["plan", str(pipeline), "groups.all={gpus_per_node: 2, gpu: H200}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{pipeline}: tiny, ")
    assert "group all: 2 x H200 of 139.8 GiB, 1 machine" in out


def test_exits_with_3_where_it_does_not_fit(pipeline, capsys):
    large = "model={init: {model_type: llama}, tokenizer: {kind: bytes}}"
    call = ["plan", str(pipeline), large, "groups.all={gpus_per_node: 2}", "--gpu", "L4", "--json"]
    assert main(call) == 3
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["fits"] is False and told["problems"][0]["engine"] == "actor"
    assert "dagrl plan: group all: actor needs " in captured.err and "GiB more than its 22" in captured.err
    assert "dagrl plan: it fits with " in captured.err
    assert main([*call, *told["change"]]) == 0


def test_a_wrong_file_a_wrong_gpu_and_an_unknown_model_exit_with_2(pipeline, capsys):
    assert main(["plan", str(pipeline), "groups.all.gpu=H201"]) == 2
    assert "no GPU is known as 'H201'; did you mean `H20`?" in capsys.readouterr().err
    assert main(["plan", str(pipeline), "--gpu", "none"]) == 2
    assert "dagrl plan: no GPU is known as 'none'; choose from: " in capsys.readouterr().err
    assert main(["plan", str(pipeline), "model.init.model_type=gpt2"]) == 2
    assert "the megatron engine has no model type 'gpt2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("template", "overrides", "names"),
    [
        ("grpo", [], ["Qwen/Qwen3-1.7B"]),
        ("grpo", ["model.path=/gone/qwen2.5-0.5b-instruct"], ["Qwen/Qwen2.5-0.5B-Instruct"]),
        ("judge", [], ["Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"]),
    ],
)
def test_plans_published_models_in_place_of_folders_of_another_machine(
    template, overrides, names, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = str(Path(__file__).parents[2] / "dag_templates" / f"{template}.yaml")
    assert main(["plan", file, *overrides, "--gpu", "H200"]) == 0
    captured = capsys.readouterr()
    assert "a step: " in captured.out
    told = [line for line in captured.err.splitlines() if "does not exist, so the plan uses" in line]
    assert [line.rpartition(" ")[2] for line in told] == names


def test_a_folder_that_no_published_model_is_called_by_is_missing(capsys):
    template = str(Path(__file__).parents[2] / "dag_templates" / "grpo.yaml")
    assert main(["plan", template, "model.path=/gone/Qwen9-8B"]) == 2
    assert "/gone/Qwen9-8B does not exist; give a Hugging Face folder" in capsys.readouterr().err


def test_a_validation_alone_has_memory_and_no_step(pipeline, capsys):
    call = ["plan", str(pipeline), "data.val=x.parquet", "run.val_only=true"]
    assert main(call) == 0
    assert "a step: not estimated, as the run only validates" in capsys.readouterr().out
    assert main([*call, "--simulate", "x.json"]) == 2
    assert "a run that only validates has no steps to estimate" in capsys.readouterr().err


def test_says_what_a_step_will_take(pipeline, capsys):
    assert main(["plan", str(pipeline)]) == 0
    text = capsys.readouterr().out
    assert "\na step: " in text and "on CPU slots these are orders of magnitude" in text
    assert main(["plan", str(pipeline), "--response-tokens", "1", "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    assert step["assumed"]["response_tokens"] == 1
    assert step["step_s"] > max(step["node_s"].values()) > 0
    assert {"from", "to", "bytes"} == step["edges"][0].keys()
    assert main(["plan", str(pipeline), "--response-tokens", "1000000"]) == 2
    assert "dagrl plan: responses of 1e+06 tokens on average do not fit" in capsys.readouterr().err


def test_a_part_has_its_own_engines_and_step(pipeline, capsys):
    for only, engine in (("rollout,reward", "generator"), ("advantage,update", "actor")):
        assert main(["plan", str(pipeline), "--only", only, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        (step,) = planned["steps"]
        assert [engines["engines"][0]["name"].split()[0] for engines in planned["groups"]] == [engine]
        assert step["response_tokens_per_s"] > 0
    assert main(["plan", str(pipeline), "--only", "nothing"]) == 2
    assert "dagrl plan: --only: there is no node `nothing`" in capsys.readouterr().err
    assert main(["plan", str(pipeline), "--only", "rollout,reward", "--search"]) == 2
    assert "dagrl plan: --search lays out whole pipelines; remove --only" in capsys.readouterr().err


def test_says_in_how_many_rounds_a_filter_is_thought_to_fill_a_step(pipeline, capsys):
    call = ["plan", str(pipeline), "nodes.keep={op: filter, lower: 0.5}"]
    assert main(call) == 0
    assert "in one round, as `keep` does not set expected_kept_fraction" in capsys.readouterr().out
    assert main([*call, "nodes.keep.expected_kept_fraction=0.4"]) == 0
    assert "in 3 rounds, as `keep` is expected to keep 40% of the groups" in capsys.readouterr().out


def test_says_that_all_rows_are_counted_where_a_node_chooses_them_in_the_run(pipeline, capsys):
    judge = (
        "{op: judge, endpoint: 'http://judge/v1', model: m, prompt: '{response}', write: judged, rows: {%s: [train]}}"
    )
    for column, said in (("data_source", True), ("data_set", False)):
        merge = "nodes.merged={op: merge, columns: [judged, right], write: reward}"
        call = ["plan", str(pipeline), f"nodes.judged={judge % column}", "nodes.reward.write=right", merge]
        assert main(call) == 0
        output = capsys.readouterr().out
        assert (
            "with all rows for `judged`: which of them its `rows` choose is known only in the run" in output
        ) == said


def test_proposes_layouts_as_overrides(capsys):
    template = str(Path(__file__).parents[2] / "dag_templates" / "qwen3_8b_megatron.yaml")
    call = ["plan", template, "data.prompts_per_step=16", "--gpu", "H200", "--search", "--gpus", "2", "--json"]
    assert main([*call, "--top", "2"]) == 0
    proposals = json.loads(capsys.readouterr().out)["proposals"]
    assert len(proposals) == 2 and proposals[0]["step_s"] <= proposals[1]["step_s"]
    assert sum(group["gpus_per_node"] for group in proposals[0]["groups"].values()) == 2
    assert main(["plan", template, "data.prompts_per_step=16", *proposals[0]["overrides"], "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", template, "--search", "--gpus", "1", "--gpu", "L4"]) == 3
    assert "layouts for 1 x L4, 1 on a machine: none that was tried fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "12"], "12 GPUs are no whole machines of 8; say --nodes and --gpus-per-node"),
        (["--gpus", "2000000"], "2,000,000 GPUs are more than a search looks at, 16,384; say fewer"),
        (["--gpus", "8", "--nodes", "1"], "--gpus and --nodes with --gpus-per-node say the same twice"),
        ([], "the pipeline has no GPUs to lay out; say how many there are with --gpus"),
    ],
)
def test_an_impossible_cluster_exits_with_2(pipeline, arguments, message, capsys):
    assert main(["plan", str(pipeline), "--search", *arguments]) == 2
    assert f"dagrl plan: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8"], "--gpus is for --search; add that, or remove it"),
        (["--gpus-per-node", "8"], "--gpus-per-node is for --search; add that, or remove it"),
        (["--search", "--gpus", "2", "--simulate", "x.json"], "--simulate shows one layout; remove --search"),
        (["--simulate", "/dev/null/x.json"], "cannot write /dev/null/x.json: Not a directory"),
    ],
)
def test_options_that_would_be_without_effect_exit_with_2(pipeline, arguments, message, capsys):
    assert main(["plan", str(pipeline), *arguments]) == 2
    assert f"dagrl plan: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("gpus", ["0", "-1", "x", "2.5"])
def test_a_count_that_is_none_exits_with_2(pipeline, gpus, capsys):
    assert main(["plan", str(pipeline), "--search", f"--gpus={gpus}"]) == 2
    assert "dagrl plan: invalid value for '--gpus': " in capsys.readouterr().err


def test_needs_neither_torch_nor_ray(pipeline):
    code = f"import sys; from dagrl.cli import main; main(['plan', {str(pipeline)!r}]); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"'torch'", "'ray'", "'transformers'"} & set(out.strip("[]\n").replace(",", " ").split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--gpu", "H200"], "dagrl plan: --gpu H200 has no effect, as all groups have CPU slots\n"),
        (
            ["--gpu", "L4", LARGE],
            "dagrl plan: --gpu L4 has no effect, as all groups of GPUs name theirs in the file (`gpu:`)\n",
        ),
        (["--gpu", "H200", "groups.all={gpus_per_node: 2}"], ""),
        ([LARGE], ""),
    ],
)
def test_a_gpu_option_that_no_group_reads_is_reported(pipeline, arguments, why, capsys):
    assert main(["plan", str(pipeline), *arguments]) == 0
    assert capsys.readouterr().err == why
