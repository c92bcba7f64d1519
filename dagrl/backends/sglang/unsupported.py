"""Fields of SGLang's ServerArgs that a pipeline file may not set, or only to some values, and why.

dagrl starts servers on slots that it has chosen, talks to them in token ids, and writes new weights into them. Some
fields clash with that, others follow from what is said elsewhere. Held against SGLang 0.5.17, field by field.

The checks tell of them before a run; the engine asks again when it is built. Works on names and plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.unsupported import Clash


def clashes_of(engine: SglangEngineSpec) -> Iterator[tuple[str, str]]:
    """Field and reason of everything in an engine's ``server`` that cannot stand there."""
    for field, value in engine.server.items():
        for clash in CLASHES:
            if clash.hits(engine, field, value):
                yield field, clash.reason
                break


def _follows(engine: SglangEngineSpec) -> bool:
    return engine.weights_from is not None


CLASHES: tuple[Clash, ...] = (
    # -- what other sections say
    Clash(
        ("model_path", "revision", "tokenizer_path", "tokenizer_mode", "tokenizer_backend", "json_model_override_args"),
        "follows from `model`; take it out",
    ),
    Clash(
        ("nnodes", "node_rank", "dist_init_addr", "nccl_port", "base_gpu_id", "gpu_id_step", "device", "use_ray"),
        "follows from the group; take it out",
        harmless=(False,),
    ),
    Clash(("random_seed",), "follows from run.seed; take it out"),
    Clash(
        ("preferred_sampling_params", "sampling_defaults"),
        "is said by the rollout's `sampling`; take it out",
        harmless=("openai",),
    ),
    # -- token ids in and out
    Clash(("skip_tokenizer_init",), "must be true, as tokens go in and out by their ids; take it out", (True,)),
    Clash(
        ("tokenizer_worker_num", "detokenizer_worker_num", "enable_dynamic_batch_tokenizer"),
        "is of no use, as tokens go in and out by their ids; take it out",
        harmless=(1, False),
    ),
    Clash(("incremental_streaming_output",), "is chosen by dagrl's client; take it out", harmless=(False,)),
    Clash(
        ("allow_auto_truncate",),
        "cuts prompts without a word; take it out, and say `data.overlong_prompts`",
        harmless=(False,),
    ),
    Clash(("max_queued_requests",), "turns away requests that a rollout must have; take it out"),
    # -- an engine inside the worker
    Clash(
        (
            *("host", "port", "fastapi_root_path", "smg_grpc_mode", "grpc_mode", "grpc_port", "sidecar"),
            *("sidecar_args", "warmups", "enable_http2", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
            *("ssl_keyfile_password", "enable_ssl_refresh", "api_key", "admin_api_key", "served_model_name"),
            *("chat_template", "hf_chat_template_name", "completion_template", "reasoning_parser"),
            *("tool_call_parser", "tool_server", "default_chat_template_kwargs", "log_level_http"),
        ),
        "is of the HTTP server, which dagrl does not start; take it out",
        harmless=(False,),
    ),
    Clash(("custom_sigquit_handler",), "takes a function, which a pipeline file cannot hold; take it out"),
    Clash(
        ("is_embedding", "encoder_only", "language_only", "dllm_algorithm", "prefill_only_disable_kv_cache"),
        "makes a server that does not generate token by token; take it out",
        harmless=(False,),
    ),
    Clash(
        ("disaggregation_mode", "decoupled_spec_role", "ep_join_mode", "elastic_ep_backend"),
        "makes a part of a larger server, which dagrl does not know of; take it out",
        harmless=("null",),
    ),
    Clash(("dwdp_size",), "is for servers that only compute prompts; take it out", harmless=(1,)),
    Clash(
        ("enable_lora", "lora_paths"),
        "is of adapters, which dagrl neither trains nor asks for; take it out",
        harmless=(False,),
    ),
    # -- weights
    Clash(("weight_version",), "is counted by dagrl; take it out"),
    Clash(("custom_weight_loader",), "is how dagrl hands over weights; take it out"),
    Clash(
        ("enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"),
        "follows from whether the engine sleeps; take it out",
    ),
    Clash(
        ("delete_ckpt_after_loading",),
        "deletes the model's own files; take it out",
        harmless=(False,),
    ),
    Clash(
        (
            *("weight_cache_mode", "checkpoint_engine_wait_weights_before_ready"),
            *(
                "remote_instance_weight_loader_seed_instance_ip",
                "remote_instance_weight_loader_seed_instance_service_port",
            ),
            "remote_instance_weight_loader_start_seed_via_transfer_engine",
        ),
        "takes weights from another server, and dagrl has its own ways; take it out",
        harmless=("off", False),
    ),
    Clash(
        ("load_format",),
        "is of no use, as the weights come from the engine that this one follows; take it out",
        harmless=("auto", "dummy"),
        where=_follows,
    ),
    Clash(
        (
            *("quantization", "modelopt_quant", "torchao_config", "quantize_and_serve", "rl_quant_profile"),
            "kt_weight_path",
        ),
        "keeps weights in a format that new ones cannot be written into; take it out",
        harmless=(False, "", "unquant"),
        where=_follows,
    ),
    Clash(
        ("cpu_offload_gb", "offload_group_size"),
        "keeps weights where new ones cannot be written to; take it out",
        harmless=(0, -1),
        where=_follows,
    ),
    Clash(
        ("enable_eplb", "ep_num_redundant_experts", "init_expert_location"),
        "moves experts about, and new weights would come to their old places; take it out",
        harmless=(False, 0, "trivial"),
        where=_follows,
    ),
    Clash(
        ("enable_symm_mem",),
        "has NCCL allocate memory in a way that the trainer's processes cannot open; take it out",
        harmless=(False,),
        where=_follows,
    ),
    Clash(
        ("speculative_algorithm",),
        "drafts with weights that no sync brings up to date; take it out, or choose NGRAM",
        harmless=("NGRAM",),
        where=_follows,
    ),
)
"""What clashes. Where several hit a field, the first one is told."""
