"""What `dagrl validate` reports of `server:` and `weight_sync:` of a SGLang engine."""

import pytest

from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.validation import check_file

GENERATOR = "  generator: {backend: hf, group: rollout, weights_from: actor}\n"
GROUPS = "  train: {cpus_per_node: 2}\n  rollout: {cpus_per_node: 1}\n"
MIXTURE = "model_type: qwen3_moe, num_experts: 8, moe_intermediate_size: 32"


@pytest.fixture
def with_server(project):
    """The pipeline on GPUs, with a SGLang engine that says `line` besides; rollouts run on `rollout`."""

    def make(line: str, rollout: str = "gpus_per_node: 4", *edits: tuple[str, str]):
        engine = f"  generator:\n    backend: sglang\n    group: rollout\n    weights_from: actor\n    {line}\n"
        groups = f"  train: {{gpus_per_node: 2}}\n  rollout: {{{rollout}}}\n"
        return project.pipeline((GENERATOR, engine), (GROUPS, groups), *edits)

    return make


@pytest.mark.parametrize(
    "line",
    [
        "",
        "server: {}",
        "server: {tp_size: 2, mem_fraction_static: 0.8, cuda_graph_max_bs_decode: 512, attention_backend: fa3}",
        "server: {tp_size: 4, dp_size: 2, enable_dp_attention: true}",
        "server: {pp_size: 2, log_level: warning, context_length: 24}",
        "server: {dtype: bfloat16, disable_radix_cache: true}",
        "weight_sync: {route: broadcast, bucket_mib: 512, checksum: true, pause: abort}",
        "weight_sync: {route: object_store}",
    ],
)
def test_servers_that_can_be(with_server, line):
    assert not check_file(with_server(line)).warnings


WRONG = [
    ("tp_sise: 2", "untested-field", "`tp_size`"),
    ("cuda_graph_max_bs: 8", "untested-field", "`cuda_graph_max_bs_decode`"),
    ("no_such_thing_at_all_here: 8", "untested-field", "extra: {server: {"),
    ("schedule_policy: fcsf", "untested-field", "schedule_policy"),
    ("custom_sigquit_handler: f", "untested-field", "custom_sigquit_handler"),
    ("load_format: presharded", "untested-field", "load_format"),
    ("quantization: fp8", "untested-field", "quantization"),
    ("cpu_offload_gb: 4", "untested-field", "cpu_offload_gb"),
    ("speculative_algorithm: EAGLE", "untested-field", "speculative_algorithm"),
    ("delete_ckpt_after_loading: true", "untested-field", "delete_ckpt_after_loading"),
    ("dwdp_size: 4", "untested-field", "dwdp_size"),
    ("enable_lora: true", "untested-field", "enable_lora"),
    ("enable_torch_compile: true", "untested-field", "enable_torch_compile"),
    ("decode_log_interval: 0", "untested-field", "decode_log_interval"),
    ("disable_radix_cache: 1", "invalid-value", "true or false"),
    ("max_running_requests: many", "invalid-value", "integer"),
    ("max_running_requests: 0", "invalid-value", "greater"),
    ("cuda_graph_bs_decode: 8", "invalid-value", "list"),
    ("tp_size: two", "invalid-value", "integer"),
    ("tp_size: true", "invalid-value", "integer"),
    ("dp_size: 0", "invalid-value", "greater"),
    ("mem_fraction_static: 1.2", "invalid-value", "less than 1"),
    ("mem_fraction_static: 0", "invalid-value", "greater than 0"),
    ("cuda_graph_backend_prefill: of", "unknown-option", "disabled"),
    ("model_path: other", "refused-key", "`model`"),
    ("nnodes: 2", "refused-key", "group"),
    ("skip_tokenizer_init: false", "refused-key", "tokens"),
    ("port: 30000", "refused-key", "HTTP"),
    ("random_seed: 3", "refused-key", "`run.seed`"),
    ("enable_memory_saver: true", "refused-key", "`sleep`"),
    ("tp_size: 3", "takes 3 GPUs, which do not divide the 4 of group `rollout`", ""),
    ("context_length: 23", "24 (data.max_prompt_tokens + nodes.rollout", ""),
    ("enable_return_routed_experts: true", "the model has no experts", ""),
    ("enable_dp_attention: true", "set dp_size above 1", ""),
]


@pytest.mark.parametrize(("field", "code", "named"), WRONG, ids=[field for field, *_ in WRONG])
def test_wrong_fields(project, with_server, field, code, named):
    path = with_server(f"server: {{{field}}} #!")
    project.assert_problem(path, f"engines.generator.server.{field.partition(':')[0]}", code, named)


@pytest.mark.parametrize(
    ("extra", "code"),
    [("model_path: other", "refused-key"), ("nccl_port: 4000", "refused-key"), ("tp_size: 2", "tested-field")],
)
def test_fields_that_extra_cannot_set(project, with_server, extra, code):
    path = with_server(f"extra: {{server: {{{extra}}}}} #!")
    project.assert_problem(path, f"engines.generator.extra.server.{extra.partition(':')[0]}", code)


def test_extra_fields_are_passed_on_with_one_warning(with_server):
    checked = check_file(with_server("extra: {server: {enable_lora: true, schedule_policy: lpm}}"))
    (warning,) = checked.warnings
    assert (warning.place, warning.code) == ("engines.generator.extra", "untested-fields")
    assert "`enable_lora` and `schedule_policy`" in warning.message
    generator = checked.loaded.pipeline.engines["generator"]
    assert isinstance(generator, SglangEngineSpec)
    assert generator.server == {"enable_lora": True, "schedule_policy": "lpm"}


@pytest.mark.parametrize(
    ("line", "place", "fragment"),
    [
        ("server: {tp_size: 2, pp_size: 4}", "server.pp_size", "takes 8 GPUs, which do not divide the 4"),
        ("server: {tp_size: 4, ep_size: 3}", "server.ep_size", "a subdivision of tp_size = 4"),
        ("server: {tp_size: 4, dcp_size: 3}", "server.dcp_size", "a subdivision of tp_size = 4"),
        (
            "server: {tp_size: 4, dp_size: 2, enable_dp_attention: true, attn_cp_size: 4}",
            "server.attn_cp_size",
            "does not divide the 2 GPUs of each of 2 copies of attention",
        ),
        (
            "server: {tp_size: 2, pp_size: 2, attn_cp_size: 2, moe_dp_size: 2}",
            "server.moe_dp_size",
            "not go with pipeline",
        ),
        (
            "server: {tp_size: 4, attn_cp_size: 2, moe_dp_size: 2, ep_size: 4}",
            "server.moe_dp_size",
            "2 copies of experts over 4 GPUs each (ep_size) are not tp_size = 4; choose sizes whose product is 4",
        ),
        (
            "server: {tp_size: 4, moe_dp_size: 2}",
            "server.moe_dp_size",
            "experts need attn_cp_size: 2; set that",
        ),
        ("weight_sync: {route: cuda_ipc}", "weight_sync.route", "`actor` is on group `train`; choose broadcast"),
    ],
)
def test_errors_of_a_server_are_reported(project, with_server, line, place, fragment):
    project.assert_problem(with_server(f"{line} #!"), f"engines.generator.{place}", fragment)


@pytest.mark.parametrize(
    ("line", "rollout", "place", "fragment"),
    [
        ("tp_size: 4", "nodes: 2, gpus_per_node: 6", "tp_size", "would lie on parts of machines with 6 GPUs"),
        ("tp_size: 2, pp_size: 6", "nodes: 4, gpus_per_node: 3", "pp_size", "do not split evenly over 4 machines"),
        ("tp_size: 2", "cpus_per_node: 2", "tp_size", "a server on CPU slots takes one of them; leave it at 1"),
        ("tp_size: 4, dp_size: 3, enable_dp_attention: true", "gpus_per_node: 4", "dp_size", "choose a divisor of 4"),
    ],
)
def test_servers_have_to_fit_their_machines(project, with_server, line, rollout, place, fragment):
    path = with_server(f"server: {{{line}}} #!", rollout)
    project.assert_problem(path, f"engines.generator.server.{place}", fragment)


def test_a_server_too_large_for_a_cpu_has_one_problem(project, with_server):
    edit = ("train: {gpus_per_node: 2}", "train: {cpus_per_node: 2}")
    (problem,) = project.problems(with_server("server: {tp_size: 2}", "cpus_per_node: 2", edit))
    assert problem.place == "engines.generator.server.tp_size"


def test_servers_across_machines(with_server):
    check_file(with_server("server: {tp_size: 4, pp_size: 2}", "nodes: 4, gpus_per_node: 4"))
    check_file(with_server("server: {tp_size: 4, pp_size: 2}", "nodes: 4, gpus_per_node: 2"))
    check_file(with_server("server: {pp_size: 4}", "nodes: 2, gpus_per_node: 2"))


def test_layers_without_experts_that_sglang_would_take_for_others(project, with_server):
    """It would fill them with experts, and those with whatever is in memory."""
    path = with_server("#", "gpus_per_node: 4", ("model_type: qwen3", f"{MIXTURE}, mlp_only_layers: [1]"))
    (problem,) = project.problems(path)
    assert problem.place == "engines.generator.backend"
    assert "some layers of this model have none" in problem.message
    check_file(with_server("#", "gpus_per_node: 4", ("model_type: qwen3", MIXTURE)))


@pytest.mark.parametrize(
    ("line", "model", "place", "fragment"),
    [
        (
            "tp_size: 8",
            "model_type: qwen3",
            "tp_size",
            "8 GPUs do not share the model's num_attention_heads, 4, evenly",
        ),
        ("pp_size: 4", "model_type: qwen3, num_hidden_layers: 2", "pp_size", "the model has only 2 layers"),
        (
            "tp_size: 4, ep_size: 4",
            f"{MIXTURE.replace('8', '6')}, num_experts_per_tok: 2",
            "ep_size",
            "does not divide the model's num_experts, 6",
        ),
    ],
)
def test_servers_have_to_fit_the_model(project, with_server, line, model, place, fragment):
    path = with_server(f"server: {{{line}}} #!", "gpus_per_node: 8", ("model_type: qwen3", model))
    project.assert_problem(path, f"engines.generator.server.{place}", fragment)


def test_more_gpus_than_key_heads_are_a_matter_of_multiples(project, with_server):
    heads = (
        "num_attention_heads: 4, num_key_value_heads: 2",
        "num_attention_heads: 12, num_key_value_heads: 4, head_dim: 8",
    )
    check_file(with_server("server: {tp_size: 12}", "gpus_per_node: 12", heads))
    path = with_server("server: {tp_size: 6} #!", "gpus_per_node: 12", heads)
    project.assert_problem(path, "engines.generator.server.tp_size", "the model's num_key_value_heads, 4, evenly")


def test_a_context_that_is_shared_out_leaves_each_head_fewer_gpus(project, with_server):
    """Eight GPUs would not share four heads; two of a context's parts with four each do."""
    check_file(with_server("server: {tp_size: 8, attn_cp_size: 2}", "gpus_per_node: 8"))
    path = with_server("server: {tp_size: 6, attn_cp_size: 2} #!", "gpus_per_node: 6")
    project.assert_problem(path, "engines.generator.server.tp_size", "3 GPUs do not share the model's num_attention")


def test_routes_may_be_requested_for_mixtures_only(with_server):
    line = "server: {tp_size: 4, ep_size: 4, enable_return_routed_experts: true}"
    check_file(with_server(line, "gpus_per_node: 4", ("model_type: qwen3", MIXTURE)))


@pytest.mark.parametrize(
    ("route", "fragment"),
    [("broadcast", "which shares the group; choose cuda_ipc"), ("cuda_ipc", ""), ("object_store", "")],
)
def test_routes_within_a_group(project, with_server, route, fragment):
    colocated = ("    group: rollout\n", "    group: train\n")
    path = with_server(f"weight_sync: {{route: {route}}} #!")
    text = path.read_text()
    assert text.count(colocated[0]) == 1
    path.write_text(text.replace(*colocated))
    if fragment:
        project.assert_problem(path, "engines.generator.weight_sync.route", fragment)
    else:
        check_file(path)


def test_a_route_between_a_gpu_and_a_cpu(project, with_server):
    path = with_server("weight_sync: {route: broadcast} #!", "cpus_per_node: 1")
    project.assert_problem(
        path, "engines.generator.weight_sync.route", "has GPUs and the other has not; choose object_"
    )


@pytest.mark.parametrize(("size", "is_wrong"), [(8, True), (4, False)])
def test_a_route_through_one_machines_memory(project, with_server, size, is_wrong):
    # The model has four heads.
    line = f"server: {{pp_size: 2, tp_size: {size // 2}}}\n    weight_sync: {{route: object_store}} #!"
    path = with_server(line, "nodes: 2, gpus_per_node: 4")
    if is_wrong:
        project.assert_problem(
            path, "engines.generator.weight_sync.route", "goes through one machine's memory, and a server spans several"
        )
    else:
        check_file(path)


def test_options_of_weights_without_a_sender_are_warnings(project, with_server):
    path = with_server("weight_sync: {checksum: true}")
    path.write_text(path.read_text().replace("    weights_from: actor\n", ""))
    assert {warning.place for warning in check_file(path).warnings} == {
        "engines.generator.weight_sync",
        "engines.generator",
    }


def test_features_that_need_a_start_from_files(with_server):
    path = with_server("extra: {server: {quantization: fp8, load_format: presharded, cpu_offload_gb: 4}}")
    path.write_text(path.read_text().replace("    weights_from: actor\n", ""))
    check_file(path)


def test_copies_within_a_server_are_for_weights_that_stay_and_one_machine(project, with_server):
    path = with_server("server: {tp_size: 2, dp_size: 2}")
    path.write_text(path.read_text().replace("    weights_from: actor\n", ""))
    check_file(path)
    path = with_server("server: {tp_size: 2, dp_size: 4} #!", "nodes: 2, gpus_per_node: 4")
    path.write_text(path.read_text().replace("    weights_from: actor\n", ""))
    project.assert_problem(path, "engines.generator.server.dp_size", "copies of a model do not span machines")


def test_a_cpu_slots_cache_has_an_end(project, with_server):
    longest = ("sampling: {max_new_tokens: 8}", "sampling: {max_new_tokens: 20000}")
    batches = ("op: update, engine: actor,", "op: update, engine: actor, tokens_per_micro_batch: 30000,")
    scores = ("op: logprob, engine: reference,", "op: logprob, engine: reference, tokens_per_micro_batch: 30000,")
    path = with_server("server: {} #!", "cpus_per_node: 1", longest, batches, scores)
    project.assert_problem(path, "engines.generator.server.max_total_tokens", "16384 tokens cannot hold the longest")
    check_file(path, ["engines.generator.server.max_total_tokens=20024"])
    # Whole pages count, of which two may be lost.
    paged = "engines.generator.server={page_size: 256, max_total_tokens: %d}"
    assert "set max_total_tokens to 20736 or more" in project.only_problem(path, paged % 20735).message
    check_file(path, [paged % 20736])


@pytest.mark.parametrize(
    ("server", "sampling", "place", "fragment"),
    [
        (
            "{max_total_tokens: 64} #!",
            "{max_new_tokens: 8}",
            "engines.wise.server.max_total_tokens",
            "64 tokens cannot hold the longest sample, 72 (nodes.reward.max_prompt_tokens + "
            "nodes.reward.sampling.max_new_tokens); set max_total_tokens to 80 or more",
        ),
        (
            "{}",
            "{max_new_tokens: 8, ignore_eos: true, stop_token_ids: [3]} #!",
            "nodes.reward.sampling.ignore_eos",
            "SGLang ignores stop_token_ids, too; remove one of the two",
        ),
    ],
)
def test_a_judge_has_to_fit_as_samples_do(project, server, sampling, place, fragment):
    judge = "\n    op: judge\n    engine: wise\n    prompt: Rate {response}.\n    max_prompt_tokens: 64\n"
    wise = f"  wise:\n    backend: sglang\n    group: rollout\n    server: {server}\n{GENERATOR}"
    path = project.pipeline(("{op: reward, fn: exact}", f"{judge}    sampling: {sampling}"), (GENERATOR, wise))
    project.assert_problem(path, place, fragment)


@pytest.mark.parametrize("key", ["sampling", "val_sampling"])
def test_stops_that_sglang_would_not_see(project, with_server, key):
    sampling = "{max_new_tokens: 8, ignore_eos: true, stop_token_ids: [3]}"
    other = "" if key == "sampling" else "sampling: {max_new_tokens: 8}, "
    nodes = ("sampling: {max_new_tokens: 8}}", f"{other}{key}: {sampling}}} #!")
    path = with_server("server: {}", "gpus_per_node: 4", nodes)
    project.assert_problem(
        path, f"nodes.rollout.{key}.ignore_eos", "SGLang ignores stop_token_ids, too; remove one of the two"
    )


def test_min_p_without_which_sglang_draws_by_seeds(project, with_server):
    nodes = ("sampling: {max_new_tokens: 8}}", "sampling: {max_new_tokens: 8, min_p: 0.1}} #!")
    path = with_server("server: {enable_deterministic_inference: true}", "gpus_per_node: 4", nodes)
    project.assert_problem(path, "nodes.rollout.sampling.min_p", "SGLang crashes with `enable_deterministic_inference`")
    check_file(path, ["nodes.rollout.sampling.min_p=0"])


def test_samples_are_shorter_than_a_window_that_sglang_leaves_out(with_server, project):
    def mistral(window: str):
        return with_server("", "gpus_per_node: 4", ("model_type: qwen3,", f"model_type: mistral, {window},"))

    for window in ("sliding_window: 4096", "sliding_window: null"):
        check_file(mistral(window))
    (problem,) = project.problems(mistral("sliding_window: 4"))
    assert (problem.place, problem.code) == ("engines.generator.backend", "no-window")
    assert "SGLang ignores the model's sliding window of 4 tokens, which is shorter" in problem.message


def test_gated_delta_nets_in_a_pattern_that_sglang_does_not_know(project, with_server):
    path = with_server("")
    model = (
        "model.init={model_type: qwen3_5_text, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
        "intermediate_size: 96, num_hidden_layers: 3, head_dim: 16, layer_types: [%s]}"
    )
    linear, full = "linear_attention", "full_attention"
    assert not check_file(path, [model % ", ".join((linear, full, linear))]).warnings
    problem = project.only_problem(path, model % ", ".join((full, linear, linear)))
    assert (problem.code, problem.place) == ("layers-unlike-sglang", "engines.generator.backend")
