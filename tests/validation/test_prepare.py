"""Warnings of memory, where the file names the GPUs of its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.validation.prepare import prepare

TEMPLATES = Path(__file__).parents[2] / "dag_templates"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("gpu: null", ""),
        ("gpu: H200", ""),
        ("gpu: A100-40GB", "estimated: actor needs "),
    ],
)
def test_a_check_warns_of_what_does_not_fit_the_gpus_that_the_file_names(tmp_path: Path, said: str, told: str) -> None:
    prompts = TEMPLATES / "data" / "addition" / "train.parquet"
    file = tmp_path / "p.yaml"
    file.write_text(
        f"extends: qwen3_8b_megatron\nname: p\ndata: {{train: {prompts}, val: null, prompts_per_step: 16}}\n"
        f"run: {{validate_every: null}}\ngroups: {{gpu: {{\n  {said}}}}}\n"
    )
    found = [str(each) for each in prepare(file).warnings]
    assert len(found) == bool(told), found
    if told:
        assert found[0].startswith(f"{file}:6: groups.gpu.gpu: {told}")
        assert found[0].endswith("GiB more than its 39.5; `dagrl plan` says what would fit")
