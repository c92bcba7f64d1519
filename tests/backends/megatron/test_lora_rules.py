"""Adapters that cannot be built are refused before any engine starts."""

import pytest

from dagrl.config.errors import PipelineError
from dagrl.validation import check_file

TP, ETP, EP = "tensor_model_parallel_size", "expert_tensor_parallel_size", "expert_model_parallel_size"
MIXTURE = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
CASES = {
    "rank": (f"parallel: {{{TP}: 2}}", "{rank: 3}", "", "rank", "choose a multiple of 2"),
    "experts that ranks share": (
        f"parallel: {{{TP}: 2, sequence_parallel: true, {ETP}: 2}}",
        "{}",
        MIXTURE,
        ETP,
        "set it to 1",
    ),
    "experts apart": ("transformer: {moe_grouped_gemm: false}", "{}", MIXTURE, "moe_grouped_gemm", "remove it"),
    "a layer of other models": (
        "",
        "{target_modules: [linear_q_proj]}",
        "",
        "target_modules",
        "linear_qkv, linear_proj",
    ),
    "experts alone": ("", "{merge: false}", MIXTURE, "merge", "set it to true"),
    "to a generator that has none": ("", "{merge: false}", "", "weights_from", "let it merge them, or use sglang"),
    "no layer of any": ("", "{target_modules: [q_proj]}", "", "target_modules", "linear_q_proj"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_at_its_place(case: str, project) -> None:
    further, lora, experts, key, remedy = CASES[case]
    family = "qwen3_moe" if experts else "qwen3"
    path = project.pipeline(
        (
            "model_type: qwen3, hidden_size: 64",
            f"model_type: {family}, hidden_size: 64{', ' if experts else ''}{experts}",
        ),
        ("    group: train\n", f"    group: train\n    {further}\n    lora: {lora}\n"),
    )
    with pytest.raises(PipelineError) as error:
        check_file(path)
    (found,) = [line for line in str(error.value).splitlines() if f"{key}:" in line.replace("[0]", "")]
    assert remedy in found


def test_adapters_are_accepted(project) -> None:
    check_file(project.pipeline(("    group: train\n", "    group: train\n    lora: {rank: 8}\n")))
