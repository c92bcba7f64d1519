"""Folders that export and convert refuse, at once: without torch, which takes seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

INDEX, CONFIG = "model.safetensors.index.json", "config.json"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
SOUND = json.dumps({"model_type": "qwen3"} | dict.fromkeys(SIZES, 4))
TO_MEGATRON = ("convert", "SOURCE", "-o", "out", "--to", "megatron")
TO_HF = ("convert", "SOURCE", "-o", "out", "--to", "hf", "--model", "MODEL")
EXPORT = ("export", "SOURCE", "-o", "out")
STORED = {"metadata.json": "{}"}
CASES = {
    "no folder": (TO_MEGATRON, None, "SOURCE does not exist; give a Hugging Face folder"),
    "empty": (TO_MEGATRON, {}, "SOURCE has no config.json"),
    "config torn": (TO_MEGATRON, {CONFIG: '{"model_'}, "SOURCE/config.json is not a JSON object"),
    "config a list": (TO_MEGATRON, {CONFIG: "[1]"}, "SOURCE/config.json is not a JSON object"),
    "config of brackets": (TO_MEGATRON, {CONFIG: "[" * 100_000}, "SOURCE/config.json is not a JSON object"),
    "config of bytes": (TO_MEGATRON, {CONFIG: "\udcff"}, "SOURCE/config.json is not a JSON object"),
    "no architecture": (TO_MEGATRON, {CONFIG: "{}"}, "SOURCE/config.json names no architecture"),
    "no weights": (TO_MEGATRON, {CONFIG: SOUND}, "SOURCE has no safetensors weights"),
    "index of nothing": (TO_MEGATRON, {CONFIG: SOUND, INDEX: '{"weight_map": {}}'}, "does not say which file"),
    "index of numbers": (TO_MEGATRON, {CONFIG: SOUND, INDEX: '{"weight_map": {"a": 1}}'}, "does not say which file"),
    "files lost": (
        TO_MEGATRON,
        {CONFIG: SOUND, INDEX: '{"weight_map": {"a": "x", "b": "y"}}'},
        "lacks 2 of its weight",
    ),
    "not Megatron's": (TO_HF, {}, "SOURCE is in no backend's own format"),
    "no Megatron folder": (TO_HF, None, "SOURCE does not exist"),
    "model empty": (TO_HF, STORED, "MODEL has no config.json"),
    "no model": ((*TO_HF[:-1], "nowhere"), STORED, "nowhere does not exist"),
    "model a file": ((*TO_HF[:-1], "file"), STORED, "file is a file, not a folder"),
    "no run": (EXPORT, {}, "SOURCE is no run folder: it has no pipeline.yaml"),
    "run a file": (("export", "file", "-o", "out"), {}, "file is no run folder"),
    "output taken": (("convert", "WHOLE", "-o", "WHOLE", "--to", "megatron"), {}, "WHOLE exists and is not empty"),
    "output a file": (("convert", "WHOLE", "-o", "file", "--to", "megatron"), {}, "file exists and is not empty"),
}
_CALLS = """
import json, sys
from dagrl.cli import main
for folder, call in json.load(sys.stdin):
    import os
    os.chdir(folder)
    print(main(call), "torch" in sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each case's output, exit code and whether torch was imported; all in one process."""
    calls = []
    for call, files, _ in CASES.values():
        folder = tmp_path_factory.mktemp("case")
        for name, wanted in {"SOURCE": files, "MODEL": {}, "WHOLE": {CONFIG: SOUND, "model.safetensors": ""}}.items():
            for file, text in (wanted or {}).items():
                (folder / name).mkdir(exist_ok=True)
                (folder / name / file).write_text(text, errors="surrogateescape")
            if wanted is not None:
                (folder / name).mkdir(exist_ok=True)
        (folder / "file").touch()
        calls.append((str(folder), call))
    done = subprocess.run(
        [sys.executable, "-c", _CALLS], input=json.dumps(calls), capture_output=True, text=True, timeout=120
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(calls), done.stderr
    return dict(zip(CASES, ([said, end] for said, end in zip(lines[::2], lines[1::2], strict=True)), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_folder_is_one_sentence_before_torch_is_imported(answers, case: str) -> None:
    said, end = answers[case]
    assert said.startswith("dagrl ") and CASES[case][2] in said
    assert end == "2 False"


def test_nothing_is_left_of_what_was_refused(answers, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert list(Path(tmp_path_factory.getbasetemp()).glob("case*/*out*")) == []
