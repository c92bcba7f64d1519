"""`dagrl export` and `dagrl convert`, as a user calls them."""

from __future__ import annotations

import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_folders import write_model

from dagrl.cli import main
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.schema import Pipeline
from dagrl.orchestrator.export import _engine
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState, Score


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as `dagrl run` leaves it: two checkpoints of the start weights that seeds 3 and 4 draw."""
    from dagrl.backends.megatron.stored.convert import write_megatron
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    folder = tmp_path_factory.mktemp("run")
    pipeline = load_pipeline(lab.write_pipeline(folder, lab.tiny_pipeline()))
    (folder / "pipeline.yaml").write_text(pipeline.to_yaml())
    model = pipeline.pipeline.model
    for step in (3, 4):
        checkpoints = Checkpoints(folder, keep=9)
        aside = checkpoints.begin(step)
        write_megatron(weight_source(model, step), load_hf_config(model), 24, aside)
        (aside / "release").rename(aside / "actor")
        checkpoints.finish(aside, RunState(step, ""))
    return folder


def loaded(folder: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def drawn(run: Path, seed: int) -> dict[str, Any]:
    from dagrl.backends.runtime.initial_weights import weight_source

    source = weight_source(load_pipeline(run / "pipeline.yaml").pipeline.model, seed)
    return {name: source.get(name) for name in source.names()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    import torch

    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_newest_checkpoint_or_the_one_asked_for_is_exported(run: Path, tmp_path: Path, capsys) -> None:
    from transformers import AutoTokenizer

    assert main(["export", str(run), "-o", str(tmp_path / "new" / "hf")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'hf'}: actor after step 4 of {run}\n"
    assert same(loaded(tmp_path / "new" / "hf"), drawn(run, 4))
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "hf").decode([3, 13, 4]) == "0+1"
    (tmp_path / "empty").mkdir()
    assert main(["export", str(run), "-o", str(tmp_path / "empty"), "--step", "3", "--engine", "actor"]) == 0
    assert same(loaded(tmp_path / "empty"), drawn(run, 3))


def test_the_best_checkpoint_is_exported(run: Path, tmp_path: Path, capsys) -> None:
    scored = tmp_path / "scored"
    shutil.copytree(run, scored)
    arguments = ["export", str(scored), "-o", str(tmp_path / "hf"), "--best"]
    assert main(arguments) == 2
    assert "keeps no best checkpoint; set run.keep_best before the run" in capsys.readouterr().err
    pipeline = yaml.safe_load((scored / "pipeline.yaml").read_text())
    pipeline["run"]["keep_best"] = {"metric": "val/reward/mean"}
    (scored / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    assert main(arguments) == 2
    assert f"no checkpoint of {scored} was measured by val/reward/mean yet" in capsys.readouterr().err
    checkpoints = Checkpoints(scored, keep=9)
    for step, value in ((3, 0.9), (4, 0.2)):
        aside = checkpoints.begin(step)
        (checkpoints.of_step(step) / "actor").rename(aside / "actor")
        checkpoints.finish(aside, RunState(step, "", score=Score("val/reward/mean", value)))
    assert main(arguments) == 0
    assert "actor after step 3 of" in capsys.readouterr().out
    assert same(loaded(tmp_path / "hf"), drawn(run, 3))


@pytest.mark.soak
def test_there_and_back_in_processes_of_their_own(run: Path, tmp_path: Path) -> None:
    """As on a terminal: without log output, and without the imports of the test process."""

    def dagrl(*arguments: str) -> str:
        command = [sys.executable, "-m", "dagrl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    hf, megatron, back = (str(tmp_path / name) for name in ("hf", "megatron", "back"))
    assert dagrl("export", str(run), "-o", hf) == f"{hf}: actor after step 4 of {run}\n"
    assert dagrl("convert", hf, "-o", megatron, "--to", "megatron") == f"{megatron}: {hf} for Megatron\n"
    assert (
        dagrl("convert", megatron, "-o", back, "--to", "hf", "--model", hf) == f"{back}: {megatron} for Hugging Face\n"
    )
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes(), name


def test_the_policy_is_exported_and_its_critic_where_it_is_asked_for(lab) -> None:
    pipeline = lab.tiny_pipeline()
    pipeline["engines"]["a_critic"] = {"backend": "megatron", "group": "train", "head": "value"}
    pipeline["nodes"]["learn"] = {"op": "critic", "engine": "a_critic"}
    checked = Pipeline.model_validate(pipeline)
    assert _engine(checked, None) == "actor"
    assert _engine(checked, "a_critic") == "a_critic"


def test_a_wrong_call_is_one_line_and_exits_with_2(run: Path, tmp_path: Path, capsys) -> None:
    def refusal(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        return captured.err

    out = str(tmp_path / "out")
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    never = tmp_path / "never"
    never.mkdir()
    shutil.copy(run / "pipeline.yaml", never)
    assert "is no run folder: it has no pipeline.yaml" in refusal("export", str(tmp_path), "-o", out)
    assert "holds no checkpoint yet" in refusal("export", str(never), "-o", out)
    assert "holds no checkpoint of step 9; it holds 3, 4" in refusal("export", str(run), "-o", out, "--step", "9")
    assert "the run trains no engine 'critic'; it trains actor" in refusal(
        "export", str(run), "-o", out, "--engine", "critic"
    )
    assert f"{full} exists and is not empty; name a new folder" in refusal("export", str(run), "-o", str(full))
    assert "has no config.json" in refusal("convert", str(run), "-o", out, "--to", "megatron")
    assert "--to hf needs --model" in refusal("convert", str(run), "-o", out, "--to", "hf")
    assert f"{tmp_path / 'no'} does not exist" in refusal(
        "convert", str(tmp_path / "no"), "-o", out, "--to", "megatron"
    )
    folder = tmp_path / "hf"
    write_model(folder, model_type="qwen3")
    assert "backend sglang has no format to convert to" in refusal("convert", str(folder), "-o", out, "--to", "sglang")
    under = str(full / "file" / "out")
    assert f"cannot make the folder {under}: Not a dir" in refusal(
        "convert", str(folder), "-o", under, "--to", "megatron"
    )
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("config.json", "{", "config.json is not a JSON object; copy the file again"),
        ("config.json", '{"model_type": "qwen33"}', "the megatron engine has no model type 'qwen33'; did you mean"),
        ("config.json", '{"model_type": "qwen3"}', "config.json does not say hidden_size, a size of the model"),
        ("model.safetensors", "{}", "model.safetensors is no safetensors file"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "b"}}', "lacks 1 of its weight files, b among them"),
    ],
)
def test_a_broken_folder_is_not_converted(tmp_path: Path, capsys, name: str, content: str, fragment: str) -> None:
    folder, out = tmp_path / "hf", tmp_path / "out"
    write_model(folder, model_type="qwen3")
    (folder / name).write_text(content)
    assert main(["convert", str(folder), "-o", str(out), "--to", "megatron"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), fragment in err, out.exists()) == (1, True, False), err


def test_quantised_folders_are_not_converted(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "hf"
    write_model(folder, model_type="qwen3", quantization_config={"quant_method": "gptq"})
    assert main(["convert", str(folder), "-o", str(tmp_path / "out"), "--to", "megatron"]) == 2
    assert "the weights are quantised (quantization_config, gptq), and cannot be trained" in capsys.readouterr().err


def test_a_failure_is_one_line_exits_with_1_and_leaves_nothing(run: Path, tmp_path: Path, capsys) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    for file in (broken / "checkpoints" / "step_4" / "actor").glob("*.distcp"):
        file.write_bytes(b"")
    assert main(["export", str(broken), "-o", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    torn = broken / "checkpoints" / "step_4"
    assert err.startswith(f"dagrl export: the checkpoint {torn} is torn: actor/__0_0.distcp has 0 bytes instead of ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_full_disk_is_one_line_and_leaves_nothing(run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """A limit on the size of files stands in for it."""
    # Some Pythons keep a compiled module that the limit cut short, and break on it ever after.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def refusal(*arguments: str) -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))
        try:
            code = main([*arguments, "-o", str(tmp_path / "out" / "there")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        captured = capsys.readouterr()
        assert (code, captured.out) == (1, ""), captured.err
        assert captured.err.count("\n") == 1, captured.err
        assert not any((tmp_path / "out").iterdir())
        return captured.err

    assert main(["export", str(run), "-o", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    assert "dagrl export: cannot write the weights to " in refusal("export", str(run))
    assert "dagrl convert: cannot write " in refusal("convert", str(tmp_path / "hf"), "--to", "megatron")


def test_weights_have_the_permissions_of_the_config(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "-o", str(tmp_path / "hf")]) == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
