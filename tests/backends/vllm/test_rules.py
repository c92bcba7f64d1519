"""vLLM servers in a pipeline file: where they can be, and what they cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.validation import check_file

HF = "  generator: {backend: hf, group: rollout, weights_from: actor}"


@pytest.fixture
def with_server(project):
    """The pipeline with a vLLM generator, as these keys say, on this group."""

    def write(keys: str = "", group: str = "gpus_per_node: 4") -> Path:
        return project.pipeline(
            ("  rollout: {cpus_per_node: 1}", f"  rollout: {{{group}}}"),
            (HF, f"  generator:\n    backend: vllm\n    group: rollout\n    weights_from: actor\n    {keys}"),
        )

    return write


def test_servers_fill_their_group(with_server) -> None:
    pipeline = check_file(with_server("server: {tensor_parallel_size: 2}")).loaded.pipeline
    generator = pipeline.engines["generator"]
    places = generator.layout(pipeline.groups["rollout"])
    assert [(place.dp, place.tp, place.primary) for place in places] == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, True),
        (1, 1, False),
    ]
    assert generator.layout_text(pipeline.groups["rollout"]) == "2 servers of 2 GPUs"


@pytest.mark.parametrize(
    ("keys", "group", "place", "code"),
    [
        ("server: {tensor_parallel_size: 3} #!", "gpus_per_node: 4", "tensor_parallel_size", "servers-do-not-divide"),
        ("server: {tensor_parallel_size: 2} #!", "cpus_per_node: 2", "tensor_parallel_size", "server-on-cpus"),
        ("server: {tensor_parallel_size: 8} #!", "gpus_per_node: 8", "tensor_parallel_size", "heads-do-not-divide"),
        ("server: {max_model_len: 12} #!", "gpus_per_node: 4", "max_model_len", "context-too-short"),
        ("server: {logprobs_mode: raw_logprobs} #!", "gpus_per_node: 4", "logprobs_mode", "refused-key"),
        ("server: {swap_space: 4} #!", "gpus_per_node: 4", "swap_space", "untested-field"),
    ],
)
def test_what_does_not_fit_is_an_error(project, with_server, keys: str, group: str, place: str, code: str) -> None:
    project.assert_problem(with_server(keys, group), f"engines.generator.server.{place}", code)


def test_routes_cannot_be_replayed(project) -> None:
    path = project.pipeline(
        ("  rollout: {cpus_per_node: 1}", "  rollout: {gpus_per_node: 1}"),
        (
            "model_type: qwen3,",
            "model_type: qwen3_moe, num_experts: 4, moe_intermediate_size: 32, norm_topk_prob: true,",
        ),
        ("    optimizer: {lr: 1e-3}\n", "    optimizer: {lr: 1e-3}\n    router_replay: true\n"),
        (HF, "  generator: {group: rollout, weights_from: actor, backend: vllm} #!"),
    )
    assert "no-routed-experts" in {problem.code for problem in project.problems(path)}
