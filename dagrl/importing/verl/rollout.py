"""verl's ``actor_rollout_ref.rollout``: the generator and its node."""

from __future__ import annotations

from dagrl.importing import engines, parts
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, switch, to, under
from dagrl.importing.verl.common import ACTOR, ROLLOUT, context_parallel, has_turns, packed_tokens

_SERVER = "engines.generator.server"
_NAMES = {
    "tensor_model_parallel_size": "tensor_parallel",
    "gpu_memory_utilization": "memory",
    "max_num_seqs": "requests",
    "enforce_eager": "eager",
    "max_model_len": "length",
}
"""verl's names -> those of `engines.server_key`."""


@joint(under(ROLLOUT, "name"), under(ROLLOUT, " ".join(_NAMES)), always=True)
def _server(t: Translation) -> None:
    engines.generator_of(t, f"{ROLLOUT}.name")
    parts.put_node(t, "rollout", "rollout", "generator")
    for name, target in _NAMES.items():
        t.copy(f"{ROLLOUT}.{name}", engines.server_key(t, target))


@joint(
    under(
        ROLLOUT,
        "max_num_batched_tokens enable_chunked_prefill enable_prefix_caching data_parallel_size "
        "expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size",
    )
)
def _server_rest(t: Translation) -> None:
    is_vllm = t.tree["engines.generator.backend"] == "vllm"
    for key in t.current:
        name, value = key.removeprefix(f"{ROLLOUT}."), t.get(key)
        if name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"):
            if value not in (None, 1):
                _size(t, key, name, is_vllm=is_vllm)
        elif is_vllm and name != "moe_tensor_parallel_size":
            t.copy(key, f"{_SERVER}.{name}")
        elif name == "enable_prefix_caching":
            t.write(f"{_SERVER}.disable_radix_cache", not value, key)
        elif name == "enable_chunked_prefill" and value is False:
            t.write(f"{_SERVER}.chunked_prefill_size", -1, key)
        else:
            t.imply("verl does not pass it to SGLang", key)


def _size(t: Translation, key: str, name: str, *, is_vllm: bool) -> None:
    match name, is_vllm:
        case "expert_parallel_size", True:
            t.write(f"{_SERVER}.enable_expert_parallel", True, key)
        case "expert_parallel_size", False:
            t.copy(key, f"{_SERVER}.ep_size")
        case "pipeline_model_parallel_size", True:
            t.refuse("vLLM's servers have no pipeline stages; raise the tensor-parallel size", key)
        case "pipeline_model_parallel_size", False:
            t.copy(key, f"{_SERVER}.pp_size")
        case _, True:
            t.copy(key, f"{_SERVER}.data_parallel_size")
        case _:
            t.copy(key, f"{_SERVER}.dp_size")
            t.write(f"{_SERVER}.enable_dp_attention", True, key)


@joint(under(ROLLOUT, "engine_kwargs.*"))
def _engine_arguments(t: Translation) -> None:
    backend = t.tree["engines.generator.backend"]
    for key in t.current:
        name, _, field = key.removeprefix(f"{ROLLOUT}.engine_kwargs.").partition(".")
        if name == backend and field:
            engines.library_field(t, key, "generator", "server", field)
        else:
            t.imply("is for another generator", key)


@joint(under(ROLLOUT, "free_cache_engine"))
def _sleep(t: Translation) -> None:
    key = f"{ROLLOUT}.free_cache_engine"
    if t.get(key) is False:
        t.copy(key, "engines.generator.sleep")
    else:
        t.imply("`sleep: auto` frees the memory while another engine of the group works", key)


@joint(under(ROLLOUT, "temperature top_p top_k ignore_eos do_sample"))
def _sampling(t: Translation) -> None:
    for name in ("temperature", "top_p", "top_k", "ignore_eos"):
        t.copy(f"{ROLLOUT}.{name}", f"nodes.rollout.sampling.{name}")
    if t.get(f"{ROLLOUT}.do_sample") is False:
        t.write("nodes.rollout.sampling.temperature", 0, f"{ROLLOUT}.do_sample")


@joint(under(ROLLOUT, "val_kwargs.*"))
def _validation(t: Translation) -> None:
    """Validation samples greedily unless ``do_sample`` is true."""
    prefix, target = f"{ROLLOUT}.val_kwargs", "nodes.rollout.val_sampling"
    if not t.flag(f"{prefix}.do_sample"):
        t.imply("validation takes the likeliest token, as by default", *t.current)
        return
    t.copy(f"{prefix}.temperature", f"{target}.temperature", 0)
    t.copy(f"{prefix}.top_p", f"{target}.top_p")
    t.copy(f"{prefix}.top_k", f"{target}.top_k")
    t.put(f"{target}.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
    t.imply("`val_sampling` is drawn from", f"{prefix}.do_sample")
    parts.write_val_n(t, f"{prefix}.n")


_LOG_PROB = "log_prob_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz"


@joint(under(ROLLOUT, _LOG_PROB), f"{ROLLOUT}.log_prob_micro_batch_size", always=True)
def _old(t: Translation) -> None:
    if t.get("algorithm.rollout_correction.bypass_mode") is True:
        t.imply("the generator's log-probs are the old ones", *t.current)
        return
    parts.put_logprob(t, "old", "actor", "old_logprob")
    if any(t.given(key) for key in under(ROLLOUT, _LOG_PROB).split()):
        packed_tokens(t, "nodes.old.tokens_per_micro_batch", ROLLOUT, "log_prob_", context_parallel(t, ACTOR))


@joint(under(ROLLOUT, "multi_turn.*"), "data.tool_config_path data.function_tool_path")
def _turns(t: Translation) -> None:
    prefix = f"{ROLLOUT}.multi_turn"
    if not has_turns(t):
        return
    tools = 'tools are functions here: `nodes.rollout.tools: ["module:function"]` (docs/multi_turn.md)'
    switches = under(prefix, "enable tool_config_path function_tool_path interaction_config_path")
    t.refuse(tools, *switches.split(), "data.tool_config_path", "data.function_tool_path")
    options = {"max_assistant_turns": "max_turns", "max_parallel_calls": "max_parallel_calls", "format": "tool_format"}
    for name, target in options.items():
        t.refuse(f"is `nodes.rollout.{target}`, once there are `tools`", f"{prefix}.{name}")
    reason = "counts characters; `nodes.rollout.max_observation_tokens` counts tokens"
    t.refuse(reason, f"{prefix}.max_tool_response_length")
    t.refuse("the middle is left out", f"{prefix}.tool_response_truncate_side")
    t.imply("turns are tokens, and are never rendered again", *t.rest())


@joint(under(ROLLOUT, "agent.* agent"))
def _agent(t: Translation) -> None:
    own = "your own agent loop is `nodes.rollout.agent` (docs/gateway.md)"
    for key in t.current:
        if key.endswith(".default_agent_loop"):
            if t.get(key) not in (None, "single_turn_agent", "tool_agent"):
                t.refuse(own, key)
        elif key.endswith(("agent_loop_config_path", ".path", ".name")) and t.get(key) is not None:
            t.refuse(own, key)
        else:
            t.imply("the rollout's worker plays all conversations", key)


RULES = (
    _server,
    _server_rest,
    _engine_arguments,
    _sleep,
    to(f"{ROLLOUT}.n", "nodes.rollout.n", write_default=True),
    _sampling,
    _validation,
    _old,
    _turns,
    _agent,
    switch(f"{ROLLOUT}.enable_rollout_routing_replay", "engines.actor.router_replay"),
    to(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "engines.generator.weight_sync.bucket_mib"),
    to(f"{ROLLOUT}.update_weights_bucket_megabytes", "engines.generator.weight_sync.bucket_mib"),
    refused_unless(
        0, "over-sampling is `nodes.rollout.over_sampling_batch_size`, in prompts", under(ROLLOUT, "over_sample_rate")
    ),
    refused(
        "fp8 is `quantization` of the generator, and other formats are not built in (docs/fp8.md)",
        under(ROLLOUT, "quantization*"),
    ),
    refused("draft models are not served", under(ROLLOUT, "mtp*")),
    refused(
        "rollouts are `samples/` of the run folder, and spans `timeline.json`", under(ROLLOUT, "trace.* prometheus.*")
    ),
    implied(
        "follows from the weight sync and the tokens",
        under(
            ROLLOUT,
            "load_format layered_summon dtype mode calculate_log_probs logprobs_mode skip_tokenizer_init "
            "multi_stage_wake_up disable_log_stats checkpoint_engine.* scheduling_policy cudagraph_capture_sizes "
            "layer_name_map.* _target_",
        ),
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout",
    ),
    refused("is `profile` of the pipeline (docs/profiling.md)", under(ROLLOUT, "profiler*")),
)
