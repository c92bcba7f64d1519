"""Rules of vLLM servers: that they fit their group and the model, and that samples fit into them."""

from __future__ import annotations

from typing import Any

from dagrl.backends.backend import EngineCheck
from dagrl.backends.vllm.section import ROUTED_EXPERTS, VllmEngineSpec
from dagrl.config.errors import Place, removal
from dagrl.config.schema import JudgeNode, RolloutNode, SamplingSpec

_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE = 0.01, 2.0
"""Between which vLLM samples: it raises lower ones and refuses higher ones."""


def check_servers(check: EngineCheck[VllmEngineSpec]) -> None:
    """Report servers that cannot be placed, and samples that they cannot hold."""
    engine, group, each = (
        check.engine,
        check.pipeline.groups.get(check.engine.group or ""),
        check.engine.gpus_per_server,
    )

    def error(field: str, message: str, code: str) -> None:
        place = (*check.place, "server", field)
        # One mistake in a field is enough.
        check.findings.error(place, message, code=code, depends_on=[place, ("groups",), ("model",)])

    tensor, copies = engine.tensor_size, engine.attention_copies
    larger = "data_parallel_size" if copies > tensor else "tensor_parallel_size"
    if group is not None and group.ranks:
        per_node = group.gpus_per_node or group.cpus_per_node
        if group.is_cpu and each > 1:
            error(larger, "a server on CPU slots takes one of them; leave it at 1", "server-on-cpus")
        elif per_node % each:
            message = f"a server takes {each} GPUs, which do not divide the {per_node} of a machine; choose a divisor"
            error(larger, message, "servers-do-not-divide")
    heads, keys = check.sizes.heads, check.sizes.key_value_heads
    if heads and heads.value % tensor:
        message = f"{tensor} GPUs do not share the model's {heads.name}, {heads.value}, evenly; choose a divisor of it"
        error("tensor_parallel_size", message, "heads-do-not-divide")
    if keys and keys.value % tensor and tensor % keys.value:
        message = f"{tensor} GPUs do not share the model's {keys.name}, {keys.value}, evenly"
        error("tensor_parallel_size", f"{message}; choose a divisor or a multiple of it", "heads-do-not-divide")
    if check.sizes.mixture is False:
        message = "is for the copies of attention in a mixture of experts, and the model has none; remove it: each"
        if copies > 1:
            error("data_parallel_size", f"{message} further server is a copy anyway", "no-experts")
        for field in ("enable_expert_parallel", ROUTED_EXPERTS):
            if engine.server.get(field):
                error(field, removal("is about experts, and the model has none"), "no-experts")
    _check_lengths(check, error)
    _check_temperatures(check)
    _warn_of_truncation(check)
    if check.pipeline.wants_routed_experts(check.name) and not engine.server.get(ROUTED_EXPERTS, True):
        error(ROUTED_EXPERTS, removal("turns off the routes that a trainer replays"), "no-routed-experts")
    if engine.weight_sync.route == "cuda_ipc" and engine.weights_from is not None:
        trainer = check.pipeline.engines.get(engine.weights_from)
        if trainer is not None and trainer.group != engine.group:
            message = f"cuda_ipc needs both engines on the same GPUs, and `{engine.weights_from}` is on group "
            message += f"`{trainer.group}`; choose broadcast"
            check.findings.error((*check.place, "weight_sync", "route"), message, code="route-apart")


def _check_lengths(check: EngineCheck[VllmEngineSpec], error: Any) -> None:
    longest = check.engine.server.get("max_model_len")
    if longest is None:
        return
    for name, node in check.pipeline.nodes.items():
        if isinstance(node, RolloutNode) and node.engine == check.name:
            wanted = max(check.pipeline.longest_rows(name, validated=check.pipeline.run.validates).values())
            if wanted > longest:
                message = f"{longest} tokens cannot hold the longest sample of `{name}`, {wanted}; set {wanted} or more"
                error("max_model_len", message, "context-too-short")


def _check_temperatures(check: EngineCheck[VllmEngineSpec]) -> None:
    for name, node in check.pipeline.nodes.items():
        if not isinstance(node, RolloutNode | JudgeNode) or node.engine != check.name:
            continue
        judged: dict[Place, SamplingSpec] = {("nodes", name, "sampling"): node.sampling}
        for section, sampling in (judged if isinstance(node, JudgeNode) else check.pipeline.samplings(name)).items():
            if sampling.temperature == 0:
                continue
            if not _LEAST_TEMPERATURE <= sampling.temperature <= _LARGEST_TEMPERATURE:
                message = f"vLLM samples at {_LEAST_TEMPERATURE} to {_LARGEST_TEMPERATURE:g}, not at "
                message += f"{sampling.temperature:g}; choose a temperature between them, or 0"
                check.findings.error((*section, "temperature"), message, code="temperature-of-server")


def _warn_of_truncation(check: EngineCheck[VllmEngineSpec]) -> None:
    """Warn of log-probs of training that are not those of the trainer's distribution.

    vLLM has log-probs before temperature or after everything; hf and SGLang have them between the two.
    """
    for name, node in check.pipeline.nodes.items():
        if not isinstance(node, RolloutNode) or node.engine != check.name:
            continue
        sampling = node.sampling
        given = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
        if cut := [field for field, cuts in given.items() if cuts]:
            message = (
                "vLLM's `rollout_logprob` is of the tokens that this leaves, and larger than the trainer's, which "
            )
            message += "corrections count as mismatch; hf and sglang have it before, see docs/mismatch.md"
            check.findings.warning(("nodes", name, "sampling", cut[0]), message, code="truncated-logprobs")
