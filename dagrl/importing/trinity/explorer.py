"""Trinity-RFT's ``explorer``: the generator and its node."""

from __future__ import annotations

import math

from dagrl.importing.engines import generator, library_field, server_key
from dagrl.importing.parts import put_node
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import EVAL_SAMPLING, MODEL, TASKS, eval_sets, has_own_responses


def _rollout(t: Translation) -> None:
    put_node(t, "rollout", "rollout", "generator")
    for name in ("temperature", "top_p", "top_k"):
        keys = [f"{TASKS}.taskset.rollout_args.{name}", f"model.{name}", f"{MODEL}.{name}"]
        key = next((each for each in keys if t.given(each) and t.get(each) is not None), None)
        if key:
            t.write(f"nodes.rollout.sampling.{name}", t.get(key), key)
            t.imply("the task set's takes its place", *(each for each in keys if each != key))
    for index, (one, label) in enumerate(eval_sets(t)):
        if has_own_responses(t, index):
            _val_responses(t, one, f"data.val.{label}.sampling", f"data.val.{label}.n")
        elif index == 0:
            _val_responses(t, one, "nodes.rollout.val_sampling", "nodes.rollout.val_n")
        given = (key for key in t.current if key.startswith(f"{one}.r") and t.get(key) is not None)
        t.imply("as for the first set", *given)
    t.imply("is null, or another one takes its place", *t.current)


def _val_responses(t: Translation, one: str, sampling: str, number: str) -> None:
    """Write the sampling and the number of a validation set's responses. Missing sampling is the rollout's."""
    for name, target in EVAL_SAMPLING.items():
        key, sampled = f"{one}.rollout_args.{name}", t.tree.get(f"nodes.rollout.sampling.{target}")
        if t.get(key) is not None:
            t.write(f"{sampling}.{target}", t.get(key), key)
        elif sampled is not None:
            t.put(f"{sampling}.{target}", sampled)
    key = f"{one}.repeat_times"
    if t.number(key, 1) > 1 or sampling.startswith("data."):
        t.write(number, t.number(key, 1), key)
    else:
        t.imply("one response, as by default", key)
    others = [key for key in t.current if key.startswith(f"{one}.rollout_args.") and t.get(key) is not None]
    t.refuse("has no counterpart in `sampling`", *(each for each in others if not t.is_recorded(each)))


def _server(t: Translation) -> None:
    key = f"{MODEL}.engine_type"
    backend = "sglang" if "sglang" in str(t.get(key)) else "vllm"
    generator(t, backend, key)
    tensor, memory = f"{MODEL}.tensor_parallel_size", f"{MODEL}.gpu_memory_utilization"
    if t.number(tensor, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(tensor), tensor)
    else:
        t.imply("is 1, as by default", tensor)
    t.write(server_key(t, "memory"), t.get(memory), memory)
    if t.given(f"{MODEL}.enforce_eager"):
        t.write(server_key(t, "eager"), t.get(f"{MODEL}.enforce_eager"), f"{MODEL}.enforce_eager")
    prefix = f"{MODEL}.enable_prefix_caching"
    if t.given(prefix):
        if backend == "vllm":
            t.write("engines.generator.server.enable_prefix_caching", t.get(prefix), prefix)
        else:
            t.write("engines.generator.server.disable_radix_cache", not t.get(prefix), prefix)
    for name in ("enable_chunked_prefill", "data_parallel_size", "enable_expert_parallel"):
        each = f"{MODEL}.{name}"
        if t.given(each) and backend == "vllm":
            t.write(f"engines.generator.server.{name}", t.get(each), each)
    extra = f"{MODEL}.extra_engine_args."
    for each in t.current:
        if each.startswith(extra):
            library_field(t, each, "generator", "server", each.removeprefix(extra))


def _over_rollout(t: Translation) -> None:
    key = "explorer.over_rollout.ratio"
    ratio, prompts = t.number(key, 0), t.tree["data.prompts_per_step"]
    if ratio:
        t.write("nodes.rollout.over_sampling_batch_size", prompts, key, note="all of the batch")
        t.write(
            "data.prompts_per_step", max(1, math.floor(prompts * (1 - ratio))), key, note="those that are waited for"
        )
    t.refuse("the first complete prompts make the step", *(k for k in t.current if not t.is_recorded(k)))


RULES = (
    joint(
        _rollout,
        under(
            TASKS,
            "taskset.rollout_args.temperature taskset.rollout_args.top_p taskset.rollout_args.top_k "
            "eval_tasksets.*.rollout_args.* eval_tasksets.*.repeat_times",
        ),
        *(f"{prefix}.{name}" for prefix in ("model", MODEL) for name in ("temperature", "top_p", "top_k")),
        always=True,
    ),
    joint(
        _server,
        under(
            MODEL,
            "engine_type tensor_parallel_size gpu_memory_utilization enforce_eager "
            "enable_prefix_caching enable_chunked_prefill data_parallel_size enable_expert_parallel "
            "extra_engine_args.*",
        ),
        always=True,
    ),
    joint(_over_rollout, "explorer.over_rollout.*"),
)
