"""Problems that `dagrl validate` reports for servers with `quantization`."""

from pathlib import Path

import pytest

from dagrl.validation import check_file

HF = "  generator: {backend: hf, group: rollout, weights_from: actor}"
SIZES = (
    "hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 4, "
    "head_dim: 128, vocab_size: 64"
)
NARROW = f"model_type: qwen3, {SIZES}".replace("hidden_size: 256", "hidden_size: 64")
SMALL_HEADS = f"model_type: qwen3, {SIZES}".replace("head_dim: 128", "head_dim: 64")
ODD_WIDTH = f"model_type: qwen3, {SIZES}".replace("intermediate_size: 1024", "intermediate_size: 1048")
MIXTURE = f"model_type: qwen3_moe, {SIZES}, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 256"


@pytest.fixture
def with_server(project):
    """The pipeline with servers in fp8, with these keys besides, on GPUs of this kind."""

    def write(
        backend: str, keys: str = "", gpus: str = "H200", model: str = "", edits: tuple = (), taken: str = "fp8"
    ) -> Path:
        engine = f"  generator:\n    backend: {backend}\n    group: rollout\n    weights_from: actor\n"
        group = f"gpus_per_node: 4, gpu: {gpus}" if gpus else "cpus_per_node: 1"
        path = project.pipeline(
            ("  rollout: {cpus_per_node: 1}", f"  rollout: {{{group}}}"),
            (HF, f"{engine}    quantization: {taken} #!\n    {keys}"),
            *edits,
        )
        text = path.read_text()
        begin = text.index("init: {")
        end = text.index("}", begin)
        path.write_text(f"{text[:begin]}init: {{{model or f'model_type: qwen3, {SIZES}'}{text[end:]}")
        return path

    return write


@pytest.mark.parametrize(
    ("backend", "keys", "gpus", "model"),
    [
        ("sglang", "", "H200", ""),
        ("sglang", "server: {tp_size: 4, kv_cache_dtype: fp8_e4m3}", "L40S", ""),
        ("vllm", "server: {tensor_parallel_size: 4, kv_cache_dtype: fp8_e4m3}", "H100", ""),
        ("vllm", "", "B200", ""),
        ("sglang", "server: {tp_size: 2}", "H100", MIXTURE),
        ("sglang", "server: {tp_size: 4, ep_size: 4}", "H100", MIXTURE),
        ("vllm", "server: {tensor_parallel_size: 4, enable_expert_parallel: true}", "H100", MIXTURE),
        ("vllm", "modules_to_not_convert: [model.layers.0]", "H100", MIXTURE),
    ],
)
def test_servers_that_can_be(with_server, backend: str, keys: str, gpus: str, model: str) -> None:
    checked = check_file(with_server(backend, keys, gpus, model))
    assert not checked.warnings
    engine = checked.loaded.pipeline.engines["generator"]
    assert engine.taken_fp8 is not None


@pytest.mark.parametrize(
    ("backend", "keys", "gpus", "model"),
    [
        ("sglang", "server: {tp_size: 4, kv_cache_dtype: fp8_e4m3}", "B200", ""),
        ("vllm", "server: {tensor_parallel_size: 4}", "L40S", SMALL_HEADS),
        ("sglang", "modules_to_not_convert: [model.layers.0]", "H100", NARROW),
    ],
)
def test_servers_that_can_be_with_scales_of_channels(
    with_server, backend: str, keys: str, gpus: str, model: str
) -> None:
    checked = check_file(with_server(backend, keys, gpus, model, taken="fp8_per_channel"))
    assert not checked.warnings
    taken = checked.loaded.pipeline.engines["generator"].taken_fp8
    assert taken is not None and taken.granularity == "channel"


@pytest.mark.parametrize(
    ("backend", "keys", "gpus", "model", "code", "named"),
    [
        ("sglang", "", "A100-80GB", "", "fp8-gpu", "Ampere"),
        ("sglang", "", "H200", MIXTURE, "fp8-experts", "`fp8`"),
        ("vllm", "", "H200", MIXTURE, "fp8-experts", "`fp8`"),
        ("vllm", "server: {tensor_parallel_size: 4}", "H200", ODD_WIDTH, "fp8-blocks", "intermediate_size, 1048,"),
    ],
)
def test_unsupported_scales_of_channels_are_refused(
    project, with_server, backend, keys, gpus, model, code, named
) -> None:
    path = with_server(backend, keys, gpus, model, taken="fp8_per_channel")
    project.assert_problem(path, "engines.generator.quantization", code, named)


@pytest.mark.parametrize(
    ("backend", "keys", "gpus", "model", "code", "named"),
    [
        ("sglang", "", "", "", "fp8-on-cpus", "rollout"),
        ("vllm", "", "", "", "fp8-on-cpus", "rollout"),
        ("sglang", "", "A100-80GB", "", "fp8-gpu", "Ampere"),
        ("vllm", "", "A40", "", "fp8-gpu", "A40"),
        ("sglang", "", "B200", "", "fp8-gpu", "Blackwell"),
        ("sglang", "server: {dtype: float32}", "H200", "", "fp8-dtype", "server.dtype"),
        ("sglang", "", "H200", NARROW, "fp8-blocks", "hidden_size"),
        ("sglang", "server: {tp_size: 4}", "H200", MIXTURE, "fp8-blocks", "moe_intermediate_size"),
        ("vllm", "server: {tensor_parallel_size: 4}", "H200", MIXTURE, "fp8-blocks", "tensor_parallel_size"),
        ("vllm", "server: {tensor_parallel_size: 4}", "H200", SMALL_HEADS, "fp8-blocks", "num_key_value_heads"),
    ],
)  # fmt: skip
def test_impossible_values_are_one_sentence(project, with_server, backend, keys, gpus, model, code, named) -> None:
    path = with_server(backend, keys, gpus, model)
    project.assert_problem(path, "engines.generator.quantization", code, named)


def test_adapters_alone_are_not_quantised(project, with_server) -> None:
    rate = "    optimizer: {lr: 1e-3}\n"
    path = with_server("sglang", edits=((rate, f"{rate}    lora: {{merge: false}}\n"),))
    project.assert_problem(path, "engines.generator.quantization", "fp8-adapters", "lora.merge")


def test_a_server_without_a_trainer_reads_its_own_folder(project) -> None:
    judge = "  judge:\n    backend: sglang\n    group: rollout\n    quantization: fp8 #!\n"
    path = project.pipeline(
        ("  rollout: {cpus_per_node: 1}", "  rollout: {gpus_per_node: 4}"),
        (f"{HF}\n", f"{HF}\n{judge}"),
    )
    found = [problem for problem in project.problems(path) if problem.place == "engines.judge.quantization"]
    assert [problem.code for problem in found] == ["fp8-without-trainer"]


def test_other_engines_have_no_quantization(project) -> None:
    path = project.pipeline((HF, f"{HF[:-1]}, quantization: fp8}}"))
    assert any("quantization" in problem.place for problem in project.problems(path))
