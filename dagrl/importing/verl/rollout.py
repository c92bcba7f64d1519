"""verl's ``actor_rollout_ref.rollout``: the generator and its node."""

from __future__ import annotations

from dagrl.importing.engines import generator_of, library_field, server_key
from dagrl.importing.parts import put_logprob, put_node
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ACTOR, ROLLOUT, context_parallel, has_turns, packed_tokens


def _backend(t: Translation) -> None:
    generator_of(t, f"{ROLLOUT}.name")
    put_node(t, "rollout", "rollout", "generator")


def _server(t: Translation) -> None:
    names = {
        "tensor_model_parallel_size": "tensor_parallel",
        "gpu_memory_utilization": "memory",
        "max_num_seqs": "requests",
        "enforce_eager": "eager",
        "max_model_len": "length",
    }
    for name, target in names.items():
        key = f"{ROLLOUT}.{name}"
        if t.get(key) is None:
            t.imply("is null, as by default", key)
        elif name == "tensor_model_parallel_size" or name == "gpu_memory_utilization" or t.given(key):
            t.write(server_key(t, target), t.get(key), key)


def _server_rest(t: Translation) -> None:
    is_vllm = t.tree["engines.generator.backend"] == "vllm"
    for key in t.current:
        name, value = key.removeprefix(f"{ROLLOUT}."), t.get(key)
        if name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"):
            _sizes(t, key, name, is_vllm=is_vllm)
        elif is_vllm and name != "moe_tensor_parallel_size":
            t.write(f"engines.generator.server.{name}", value, key)
        elif name == "enable_prefix_caching":
            t.write("engines.generator.server.disable_radix_cache", not value, key)
        elif name == "enable_chunked_prefill" and value is False:
            t.write("engines.generator.server.chunked_prefill_size", -1, key)
        else:
            t.imply("verl does not pass it to SGLang", key)


def _sizes(t: Translation, key: str, name: str, *, is_vllm: bool) -> None:
    value = t.get(key)
    if value in (None, 1):
        t.imply("is 1, as by default", key)
    elif name == "expert_parallel_size":
        target, sent = ("enable_expert_parallel", True) if is_vllm else ("ep_size", value)
        t.write(f"engines.generator.server.{target}", sent, key)
    elif name == "pipeline_model_parallel_size":
        if is_vllm:
            t.refuse("vLLM's servers have no pipeline stages; raise the tensor-parallel size", key)
        else:
            t.write("engines.generator.server.pp_size", value, key)
    elif is_vllm:
        t.write("engines.generator.server.data_parallel_size", value, key)
    else:
        t.write("engines.generator.server.dp_size", value, key)
        t.write("engines.generator.server.enable_dp_attention", True, key)


def _engine_arguments(t: Translation) -> None:
    backend = t.tree["engines.generator.backend"]
    for key in t.current:
        name, _, field = key.removeprefix(f"{ROLLOUT}.engine_kwargs.").partition(".")
        if name != backend or not field:
            t.imply("is for another generator", key)
        else:
            library_field(t, key, "generator", "server", field)


def _sleep(t: Translation) -> None:
    key = f"{ROLLOUT}.free_cache_engine"
    if t.get(key) is False:
        t.write("engines.generator.sleep", False, key)
    else:
        t.imply("`sleep: auto` frees the memory while another engine of the group works", key)


def _sampling(t: Translation) -> None:
    for name in ("temperature", "top_p", "top_k", "ignore_eos"):
        key = f"{ROLLOUT}.{name}"
        t.copy(key, f"nodes.rollout.sampling.{name}")
    key = f"{ROLLOUT}.do_sample"
    if t.get(key) is False:
        t.write("nodes.rollout.sampling.temperature", 0, key)
    else:
        t.imply("samples are drawn, as by default", key)


def _validation(t: Translation) -> None:
    """Validation samples greedily unless ``do_sample`` is true."""
    prefix = f"{ROLLOUT}.val_kwargs"
    names = ("temperature", "top_p", "top_k")
    if t.flag(f"{prefix}.do_sample"):
        for name in names:
            t.copy(f"{prefix}.{name}", f"nodes.rollout.val_sampling.{name}")
        if not t.given(f"{prefix}.temperature"):
            t.write("nodes.rollout.val_sampling.temperature", 0, f"{prefix}.temperature")
        t.put("nodes.rollout.val_sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
        t.imply("`val_sampling` is drawn from", f"{prefix}.do_sample")
    else:
        t.imply(
            "validation takes the likeliest token, as by default",
            *(f"{prefix}.{name}" for name in (*names, "do_sample")),
        )
    count = t.number(f"{prefix}.n", 1)
    if count > 1 and t.flag(f"{prefix}.do_sample"):
        t.write("nodes.rollout.val_n", count, f"{prefix}.n")
    else:
        t.imply("one response, as by default", f"{prefix}.n")


def _old(t: Translation) -> None:
    if t.get("algorithm.rollout_correction.bypass_mode") is True:
        t.imply_all("the generator's log-probs are the old ones")
        return
    put_logprob(t, "old", "actor", "old_logprob")
    keys = [f"{ROLLOUT}.log_prob_{name}" for name in ("max_token_len_per_gpu", "micro_batch_size_per_gpu")]
    if any(t.given(key) for key in [*keys, f"{ROLLOUT}.log_prob_use_dynamic_bsz"]):
        packed_tokens(t, "nodes.old.tokens_per_micro_batch", ROLLOUT, "log_prob_", context_parallel(t, ACTOR))


def _turns(t: Translation) -> None:
    prefix = f"{ROLLOUT}.multi_turn"
    if not has_turns(t):
        t.imply_all("responses have one turn")
        return
    tools = 'tools are functions here: `nodes.rollout.tools: ["module:function"]` (docs/multi_turn.md)'
    names = ("enable", "tool_config_path", "function_tool_path", "interaction_config_path")
    t.refuse(tools, *(f"{prefix}.{name}" for name in names), "data.tool_config_path", "data.function_tool_path")
    options = {"max_assistant_turns": "max_turns", "max_parallel_calls": "max_parallel_calls", "format": "tool_format"}
    for name, target in options.items():
        t.refuse(f"is `nodes.rollout.{target}`, once there are `tools`", f"{prefix}.{name}")
    t.refuse(
        "counts characters; `nodes.rollout.max_observation_tokens` counts tokens", f"{prefix}.max_tool_response_length"
    )
    t.refuse("the middle is left out", f"{prefix}.tool_response_truncate_side")
    rest = [key for key in t.current if not t.is_recorded(key)]
    t.imply("turns are tokens, and are never rendered again", *rest)


def _agent(t: Translation) -> None:
    key = f"{ROLLOUT}.agent.default_agent_loop"
    loop = t.get(key)
    if loop in (None, "single_turn_agent", "tool_agent"):
        t.imply("follows from `tools`", key)
    else:
        t.refuse("an agent loop of your own is `nodes.rollout.agent` (docs/gateway.md)", key)
    for each in t.current:
        if each.endswith(("agent_loop_config_path", ".path", ".name")) and t.get(each) is not None:
            t.refuse("an agent loop of your own is `nodes.rollout.agent` (docs/gateway.md)", each)
        elif each != key:
            t.imply("the rollout's worker plays all conversations", each)


def _replay(t: Translation) -> None:
    key = f"{ROLLOUT}.enable_rollout_routing_replay"
    if t.flag(key):
        t.write("engines.actor.router_replay", True, key)
    else:
        t.imply("experts are not replayed, as by default", key)


RULES = (
    joint(_backend, under(ROLLOUT, "name"), always=True),
    joint(
        _server,
        under(ROLLOUT, "tensor_model_parallel_size gpu_memory_utilization max_num_seqs enforce_eager max_model_len"),
        always=True,
    ),
    joint(
        _server_rest,
        under(
            ROLLOUT,
            "max_num_batched_tokens enable_chunked_prefill enable_prefix_caching "
            "data_parallel_size expert_parallel_size pipeline_model_parallel_size "
            "moe_tensor_parallel_size",
        ),
    ),
    joint(_engine_arguments, under(ROLLOUT, "engine_kwargs.*")),
    joint(_sleep, under(ROLLOUT, "free_cache_engine")),
    to(f"{ROLLOUT}.n", "nodes.rollout.n", write_default=True),
    joint(_sampling, under(ROLLOUT, "temperature top_p top_k ignore_eos do_sample")),
    joint(_validation, under(ROLLOUT, "val_kwargs.*")),
    joint(
        _old,
        under(
            ROLLOUT,
            "log_prob_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu "
            "log_prob_micro_batch_size log_prob_use_dynamic_bsz",
        ),
        always=True,
    ),
    joint(_turns, under(ROLLOUT, "multi_turn.*"), "data.tool_config_path data.function_tool_path"),
    joint(_agent, under(ROLLOUT, "agent.* agent")),
    joint(_replay, under(ROLLOUT, "enable_rollout_routing_replay")),
    to(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "engines.generator.weight_sync.bucket_mib"),
    to(f"{ROLLOUT}.update_weights_bucket_megabytes", "engines.generator.weight_sync.bucket_mib"),
    refused_unless(
        0, "over-sampling is `nodes.rollout.over_sampling_batch_size`, in prompts", under(ROLLOUT, "over_sample_rate")
    ),
    refused_unless(
        (None, False, {}),
        "fp8 is `quantization` of the generator, and other formats are not built in (docs/fp8.md)",
        under(ROLLOUT, "quantization*"),
    ),
    refused_unless((None, False), "draft models are not served", under(ROLLOUT, "mtp*")),
    refused(
        "rollouts are `samples/` of the run folder, and spans `timeline.json`", under(ROLLOUT, "trace.* prometheus.*")
    ),
    implied(
        "follows from the weight sync and the tokens",
        under(
            ROLLOUT,
            "load_format layered_summon dtype mode calculate_log_probs logprobs_mode "
            "skip_tokenizer_init multi_stage_wake_up disable_log_stats checkpoint_engine.* "
            "scheduling_policy cudagraph_capture_sizes layer_name_map.* _target_",
        ),
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", under(ROLLOUT, "profiler*")),
)
