import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from dagrl.cli import main
from dagrl.orchestrator.outcome import Outcome

ROW = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW] * 16), tmp_path / "train.parquet")
    path = tmp_path / "p.yaml"
    path.write_text(
        "name: tiny\n"
        "model: {init: {model_type: qwen3, hidden_size: 64}, tokenizer: {kind: bytes}}\n"
        "data: {train: train.parquet, prompts_per_step: 8, max_prompt_tokens: 16}\n"
        "groups: {all: {cpus_per_node: 2}}\n"
        "engines:\n"
        "  actor: {backend: megatron, group: all, optimizer: {lr: 1e-3}}\n"
        "  generator: {backend: hf, group: all, weights_from: actor}\n"
        "nodes:\n"
        "  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}\n"
        "  reward: {op: reward, fn: exact}\n"
        "  advantage: {op: advantage, estimator: grpo}\n"
        "  update: {op: update, engine: actor}\n"
        "run: {steps: 10}\n"
    )
    return path


class TestValidate:
    def test_says_what_the_file_declares(self, pipeline, capsys):
        assert main(["validate", str(pipeline)]) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[0] == f"{pipeline}: tiny is valid"
        for line in (
            "  qwen3 with random weights (hidden_size 64), a tokenizer of bytes",
            f"  train  {pipeline.parent / 'train.parquet'}  (16 prompts)",
            "  all  2 CPU slots",
            "  actor      megatron  on all: tp 1, dp 2",
            "  generator  hf        on all: 2 replicas, follows actor",
            "  advantage  advantage on host     reward, response_mask, group_id -> advantage",
        ):
            assert line in out

    def test_takes_overrides(self, pipeline, capsys):
        assert (
            main(["validate", str(pipeline), "name=other", "engines.actor.parallel.tensor_model_parallel_size=2"]) == 0
        )
        out = capsys.readouterr().out
        assert "other is valid" in out
        assert "on all: tp 2, dp 1" in out

    def test_prints_every_problem_on_stderr_and_exits_with_2(self, pipeline, capsys):
        assert (
            main(["validate", str(pipeline), "run.stepz=1", "groups.all.cpus_per_node=x", "data.train=no.parquet"]) == 2
        )
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert [line.split(": ")[1] for line in lines] == [
            "override run.stepz=1",
            "override groups.all.cpus_per_node=x",
            "override data.train=no.parquet",
        ]

    @pytest.mark.parametrize("content", ["", "- a\n", "name: [\n", "a: 1\na: 2\n", "name: x\n", "data: 1\nnodes: []\n"])
    def test_never_ends_in_a_traceback(self, tmp_path, capsys, content):
        path = tmp_path / "p.yaml"
        path.write_text(content)
        assert main(["validate", str(path)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines
        for line in lines:
            file, number, place, message = line.split(":", 3)
            assert (file, int(number) >= 1) == (str(path), True)
            assert place.strip()
            assert "; " in message


class TestGraph:
    def test_text_lists_stages(self, pipeline, capsys):
        assert main(["graph", str(pipeline)]) == 0
        out = capsys.readouterr().out
        assert out.startswith("stage 0\n  prompts  (the data set)\nstage 1\n  rollout  (rollout on generator)\n")
        assert "  update  (update on actor)\n    prompts -> prompt_tokens\n" in out

    def test_needs_no_data(self, pipeline, capsys):
        (pipeline.parent / "train.parquet").unlink()
        assert main(["graph", str(pipeline)]) == 0

    def test_mermaid(self, pipeline, tmp_path):
        assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.mmd")]) == 0
        lines = (tmp_path / "g.mmd").read_text().splitlines()
        assert lines[0] == "flowchart TD"
        assert '    n_reward -->|"reward"| n_advantage' in lines
        assert '    n_prompts(["<b>prompts</b><br/>the data set"])' in lines

    def test_svg_holds_every_node_and_column(self, pipeline, tmp_path):
        assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.svg")]) == 0
        root = ElementTree.parse(tmp_path / "g.svg").getroot()
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for name in ("prompts", "rollout", "reward", "advantage", "update", "samples", "update on actor"):
            assert texts.count(name) >= 1
        assert texts.count("response_mask") == 2
        lines = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("marker-end")]
        assert len(lines) == 13

    def test_png_is_a_picture_of_the_same_shape(self, pipeline, tmp_path):
        image = pytest.importorskip("PIL.Image")
        assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.png")]) == 0
        assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.svg")]) == 0
        svg = ElementTree.parse(tmp_path / "g.svg").getroot()
        with image.open(tmp_path / "g.png") as picture:
            assert abs(picture.width - 2 * float(svg.get("width"))) <= 2
            # The boxes' fill is there, so something was drawn.
            assert (219, 234, 254) in {colour for _, colour in picture.getcolors(1 << 24)}

    def test_png_without_pillow_says_what_to_do(self, pipeline, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        assert main(["graph", str(pipeline), "-o", str(tmp_path / "g.png")]) == 2
        assert "write an .svg file instead" in capsys.readouterr().err

    @pytest.mark.parametrize(("name", "fragment"), [("g.pdf", "end it in .svg"), ("no/g.svg", "there is no folder")])
    def test_an_impossible_file_is_one_line(self, pipeline, tmp_path, capsys, name, fragment):
        assert main(["graph", str(pipeline), "-o", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert fragment in err
        assert err.count("\n") == 1


def test_a_run_begins_with_what_the_check_warns_of(pipeline, capsys, monkeypatch):
    monkeypatch.setattr("dagrl.orchestrator.run.run_pipeline", lambda checked, folder: Outcome(10, stopped=False))
    assert main(["run", str(pipeline), "nodes.ref={op: logprob, engine: actor, write: ref_logprob}"]) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("dagrl run: warning: ") and "nodes.ref.engine" in warning


class TestLaunch:
    def test_on_one_machine_it_is_run(self, pipeline, capsys, monkeypatch):
        monkeypatch.setenv("PET_NNODES", "1")
        assert main(["run", str(pipeline), "run.steps=x"]) == 2
        told = capsys.readouterr()
        assert main(["launch", str(pipeline), "run.steps=x"]) == 2
        assert capsys.readouterr() == told

    def test_a_wrong_variable_is_one_line(self, pipeline, capsys, monkeypatch):
        monkeypatch.setenv("PET_NNODES", "2")
        assert main(["launch", str(pipeline)]) == 2
        assert capsys.readouterr().err == (
            "dagrl launch: PET_NNODES is 2 and PET_NODE_RANK is not set; number the machines from 0\n"
        )


def test_a_key_that_is_set_with_dashes_is_told_how(pipeline, capsys):
    with pytest.raises(SystemExit):
        main(["validate", str(pipeline), "--run.steps=3"])
    assert "unknown arguments: --run.steps=3; a key is set without dashes: run.steps=10" in capsys.readouterr().err


def test_the_command_is_installed(pipeline):
    command = shutil.which("dagrl", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run([command, "validate", str(pipeline), "run.steps=x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "command line:1: override run.steps=x: expected a whole number, got 'x'; write digits without quotes\n"
    )


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "validate" in out
    assert "graph" in out


class TestPlan:
    def test_says_what_a_run_will_take(self, pipeline, capsys):
        assert main(["plan", str(pipeline), "groups.all={gpus_per_node: 2, gpu: H200}"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{pipeline}: tiny, ")
        assert "group all: 2 x H200 of 139.8 GiB, 1 machine" in out

    def test_exits_with_3_where_it_does_not_fit(self, pipeline, capsys):
        large = "model={init: {model_type: llama}, tokenizer: {kind: bytes}}"
        call = ["plan", str(pipeline), large, "groups.all={gpus_per_node: 2}", "--gpu", "L4", "--json"]
        assert main(call) == 3
        captured = capsys.readouterr()
        told = json.loads(captured.out)
        assert told["fits"] is False and told["problems"][0]["engine"] == "actor"
        assert "dagrl plan: group all: actor needs " in captured.err and "GiB more than its 22" in captured.err
        assert "dagrl plan: it fits with " in captured.err
        assert main([*call, *told["change"]]) == 0

    def test_a_wrong_file_a_wrong_gpu_and_an_unknown_model_exit_with_2(self, pipeline, capsys):
        assert main(["plan", str(pipeline), "groups.all.gpu=H201"]) == 2
        assert "no GPU is known as 'H201'; did you mean `H20`?" in capsys.readouterr().err
        assert main(["plan", str(pipeline), "--gpu", "none"]) == 2
        assert "dagrl plan: no GPU is known as 'none'; choose from: " in capsys.readouterr().err
        unknown = ["model.init.model_type=gemma2", "engines.actor.bridge=megatron-bridge"]
        assert main(["plan", str(pipeline), *unknown]) == 2
        assert "dagrl plan: there is no estimate for model type 'gemma2'" in capsys.readouterr().err

    def test_says_what_a_step_will_take(self, pipeline, capsys):
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

    def test_says_in_how_many_rounds_a_filter_is_thought_to_fill_a_step(self, pipeline, capsys):
        call = ["plan", str(pipeline), "nodes.keep={op: filter, lower: 0.5}"]
        assert main(call) == 0
        assert "in one round, as nothing is said of how much `keep` keeps" in capsys.readouterr().out
        assert main([*call, "nodes.keep.expected_kept_fraction=0.4"]) == 0
        assert "in 3 rounds, as `keep` is expected to keep 40% of the groups" in capsys.readouterr().out

    def test_proposes_layouts_as_overrides(self, capsys):
        template = str(Path(__file__).parents[1] / "dag_templates" / "qwen3_8b_megatron.yaml")
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
    def test_what_is_no_cluster_exits_with_2(self, pipeline, arguments, message, capsys):
        assert main(["plan", str(pipeline), "--search", *arguments]) == 2
        assert f"dagrl plan: {message}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--gpus", "8"], "--gpus is for --search; add that, or take it out"),
            (["--gpus-per-node", "8"], "--gpus-per-node is for --search; add that, or take it out"),
            (["--search", "--gpus", "2", "--simulate", "x.json"], "--simulate shows one layout; take --search out"),
            (["--simulate", "/dev/null/x.json"], "cannot write /dev/null/x.json: Not a directory"),
        ],
    )
    def test_options_that_would_be_without_effect_exit_with_2(self, pipeline, arguments, message, capsys):
        assert main(["plan", str(pipeline), *arguments]) == 2
        assert f"dagrl plan: {message}" in capsys.readouterr().err

    @pytest.mark.parametrize("gpus", ["0", "-1", "x", "2.5"])
    def test_a_count_that_is_none_exits_with_2(self, pipeline, gpus, capsys):
        with pytest.raises(SystemExit) as caught:
            main(["plan", str(pipeline), "--search", f"--gpus={gpus}"])
        assert caught.value.code == 2
        assert f"argument --gpus: {gpus} is not a whole number of 1 or more" in capsys.readouterr().err

    def test_needs_neither_torch_nor_ray(self, pipeline):
        code = f"import sys; from dagrl.cli import main; main(['plan', {str(pipeline)!r}]); print(sorted(sys.modules))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert not {"'torch'", "'ray'", "'transformers'"} & set(out.strip("[]\n").replace(",", " ").split())


LARGE = "groups.all={gpus_per_node: 2, gpu: H200}"
RUN = "RUN"
"""Stands for a folder, beside the pipeline, that holds no run."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["plan", "P", "--gpu", ""], "no GPU is known as ''; choose from: "),
        (["plan", "P", "--gpu", " "], "no GPU is known as ' '; choose from: "),
        (["plan", "P", "--gpu", "H201"], "no GPU is known as 'H201'; did you mean `H20`?"),
        (["plan", "P", "--search", "--gpu", "", "--gpus", "1"], "no GPU is known as ''"),
        (["plan", "P", "--simulate", ""], "argument --simulate: expected a path, got an empty text"),
        (["plan", "P", "--simulate", "."], "cannot write .: Is a directory"),
        (["plan", "P", "--simulate", "nowhere/plan.json"], "cannot write nowhere/plan.json: No such file or directory"),
        (["plan", "P", "--search", "--gpus", "0"], "argument --gpus: 0 is not a whole number of 1 or more"),
        (["plan", "P", "--search", "--gpus", ""], "argument --gpus: '' is not a whole number of 1 or more"),
        (["plan", "P", "--search", "--nodes", " "], "argument --nodes: ' ' is not a whole number of 1 or more"),
        (["plan", "P", "--search", "--top", "0"], "argument --top: 0 is not a whole number of 1 or more"),
        (["plan", "P", "--response-tokens", ""], "argument --response-tokens: "),
        (["plan", "P", "--response-tokens", "0"], "choose a number between 1 and 8"),
        (["plan", "P", "--response-tokens", "-1"], "choose a number between 1 and 8"),
        (["plan", "P", "--response-tokens", "nan"], "choose a number between 1 and 8"),
        (["plan", "P", "--prompt-tokens", "-1"], "choose a number between 1 and 16"),
        (["plan", "P", "--prompt-tokens", "nan"], "choose a number between 1 and 16"),
        (["plan", ""], "argument PIPELINE: expected a path, got an empty text"),
        (["validate", " "], "argument PIPELINE: expected a path, got an empty text"),
        (["graph", "P", "-o", ""], "argument -o/--output: expected a path, got an empty text"),
        (["graph", "P", "-o", "dag.pdf"], "dag.pdf does not say a format; end it in .svg, .png, .mmd or .txt"),
        (["graph", "P", "-o", "dag"], "dag does not say a format; end it in .svg, .png, .mmd or .txt"),
        (["graph", "P", "-o", "nowhere/dag.svg"], "there is no folder nowhere; make it first"),
        (["run", "P", "--run-dir", ""], "argument --run-dir: expected a path, got an empty text"),
        (["report", ""], "argument RUN: expected a path, got an empty text"),
        (["report", RUN], "holds no metrics.jsonl: no run has written there"),
        (["report", RUN, "--gpu", "H200"], "--gpu is for --timeline; add that, or take it out"),
        (["report", RUN, "--gpu", ""], "--gpu is for --timeline; add that, or take it out"),
        (["report", RUN, "--timeline", "--gpu", ""], "no GPU is known as ''"),
        (["export", RUN, "-o", ""], "argument -o/--output: expected a path, got an empty text"),
        (["export", RUN, "-o", "x", "--step", "x"], "argument --step: invalid int value: 'x'"),
        (["export", RUN, "-o", "x", "--step", "1", "--best"], "argument --best: not allowed with argument --step"),
        (["export", RUN, "-o", "x"], "is no run folder: it has no pipeline.yaml"),
        (["convert", "P", "-o", "x", "--to", "gguf"], "argument --to: invalid choice: 'gguf'"),
        (["convert", "", "-o", "x", "--to", "hf"], "argument SOURCE: expected a path, got an empty text"),
        (["convert", RUN, "-o", "x", "--to", "hf", "--model", ""], "argument --model: expected a path"),
        (["trian", "P"], "argument COMMAND: invalid choice: 'trian'"),
        ([], "the following arguments are required: COMMAND"),
    ],
    ids=str,
)
def test_a_call_that_names_nothing_is_one_sentence(pipeline, call, message, capsys, monkeypatch):
    monkeypatch.chdir(pipeline.parent)
    Path(RUN).mkdir()
    try:
        code = main([str(pipeline) if argument == "P" else argument for argument in call])
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr()
    assert code == 2
    assert message in told.err
    assert told.err.count("\n") == 1


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
def test_a_gpu_that_no_group_reads_is_told(pipeline, arguments, why, capsys):
    assert main(["plan", str(pipeline), *arguments]) == 0
    assert capsys.readouterr().err == why
