"""vLLM servers in a pipeline file: where they can be, and what they cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.backends.serving.server_backend import section_to_start
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
        ("server: {tensor_paralel_size: 2} #!", "gpus_per_node: 4", "tensor_paralel_size", "untested-field"),
        ("server: {data_parallel_size: 2} #!", "gpus_per_node: 4", "data_parallel_size", "no-experts"),
        ("server: {enable_expert_parallel: true} #!", "gpus_per_node: 4", "enable_expert_parallel", "no-experts"),
        ("server: {pipeline_parallel_size: 2} #!", "gpus_per_node: 4", "pipeline_parallel_size", "refused-key"),
    ],
)
def test_a_pipeline_that_does_not_fit_is_an_error(
    project, with_server, keys: str, group: str, place: str, code: str
) -> None:
    project.assert_problem(with_server(keys, group), f"engines.generator.server.{place}", code)


@pytest.mark.parametrize(
    ("route", "group"),
    [("cuda_ipc", "gpus_per_node: 4"), ("broadcast", "gpus_per_node: 4"), ("cuda_ipc", "cpus_per_node: 1")],
)
def test_weights_that_cannot_take_the_route_are_an_error(project, with_server, route: str, group: str) -> None:
    """The trainer is on CPU slots of another group."""
    path = with_server(f"weight_sync: {{route: {route}}} #!", group)
    project.assert_problem(path, "engines.generator.weight_sync.route", "route-apart")


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_does_not_sample_at(project, temperature: float) -> None:
    path = project.pipeline(
        (HF, HF.replace("backend: hf", "backend: vllm")),
        ("sampling: {max_new_tokens: 8}}", f"sampling: {{max_new_tokens: 8, temperature: {temperature}}}}} #!"),
    )
    project.assert_problem(path, "nodes.rollout.sampling.temperature", "temperature-of-server")


@pytest.mark.parametrize(
    ("backend", "options", "warned"),
    [
        ("vllm", "top_p: 0.9", "top_p"),
        ("vllm", "top_k: 20, temperature: 0.6", "top_k"),
        ("vllm", "min_p: 0.1", "min_p"),
        ("vllm", "temperature: 0.6", None),
        ("hf", "top_p: 0.9", None),
    ],
)
def test_log_probs_after_truncation_are_warned_of(project, backend: str, options: str, warned: str | None) -> None:
    found = project.warnings(
        (HF, HF.replace("backend: hf", f"backend: {backend}")),
        ("sampling: {max_new_tokens: 8}}", f"sampling: {{max_new_tokens: 8, {options}}}}}"),
    )
    places = [place for place, code in found if code == "truncated-logprobs"]
    assert places == ([f"nodes.rollout.sampling.{warned}"] if warned else [])
    own = f"train: {{sums: {{path: train.parquet, sampling: {{max_new_tokens: 8, {options}}}}}}}"
    found = project.warnings((HF, HF.replace("backend: hf", f"backend: {backend}")), ("train: train.parquet", own))
    places = [place for place, code in found if code == "truncated-logprobs"]
    assert places == ([f"data.train.sums.sampling.{warned}"] if warned else [])


@pytest.fixture
def mixture(project):
    """A mixture of experts with a vLLM generator, as these keys say; the trainer routes tokens as it did."""

    def write(keys: str) -> Path:
        return project.pipeline(
            ("  rollout: {cpus_per_node: 1}", "  rollout: {gpus_per_node: 4}"),
            (
                "model_type: qwen3,",
                "model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32,",
            ),
            ("    optimizer: {lr: 1e-3}\n", "    optimizer: {lr: 1e-3}\n    router_replay: true\n"),
            (HF, f"  generator:\n    backend: vllm\n    group: rollout\n    weights_from: actor\n    {keys}"),
        )

    return write


def test_routes_are_reported_where_a_trainer_replays_them(project, mixture) -> None:
    path = mixture("server: {tensor_parallel_size: 2, enable_expert_parallel: true}")
    pipeline = check_file(path).loaded.pipeline
    assert section_to_start(pipeline, "generator").server["enable_return_routed_experts"] is True
    path = mixture("server: {enable_return_routed_experts: false} #!")
    project.assert_problem(path, "engines.generator.server.enable_return_routed_experts", "no-routed-experts")


def test_copies_of_attention_share_a_server_and_its_experts(mixture) -> None:
    keys = "server: {tensor_parallel_size: 2, data_parallel_size: 2, enable_expert_parallel: true}"
    pipeline = check_file(mixture(keys)).loaded.pipeline
    generator = pipeline.engines["generator"]
    assert generator.layout_text(pipeline.groups["rollout"]) == "1 server of 4 GPUs"
    assert [place.primary for place in generator.layout(pipeline.groups["rollout"])] == [True, False, False, False]
