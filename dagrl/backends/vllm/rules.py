"""Rules of vLLM servers: they must fit their group and the model, and samples must fit into them."""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.serving.rules import ServerRules
from dagrl.backends.serving.section import ROUTED_EXPERTS
from dagrl.backends.vllm.section import VllmEngineSpec
from dagrl.config.errors import removal
from dagrl.config.schema import RolloutNode

_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE = 0.01, 2.0
"""Range of temperatures in which vLLM samples: it raises lower ones and refuses higher ones."""


def check_servers(check: EngineCheck[VllmEngineSpec]) -> None:
    """Report servers that cannot be placed, and samples that they cannot hold."""
    rules, engine = ServerRules(check), check.engine
    _check_place(rules)
    rules.check_heads("tensor_parallel_size", engine.tensor_size)
    if check.sizes.mixture is False:
        message = (
            "is for the copies of attention in a mixture of experts, but the model has no experts; remove it: each"
        )
        if engine.attention_copies > 1:
            message += " further server is a copy anyway"
            rules.error("data_parallel_size", message, ("model",), code="no-experts")
        for field in ("enable_expert_parallel", ROUTED_EXPERTS):
            if engine.server.get(field):
                message = removal("is an option for experts, but the model has no experts")
                rules.error(field, message, ("model",), code="no-experts")
    for sample in rules.longest():
        rules.check_room("max_model_len", engine.server.get("max_model_len"), sample[0], sample)
    _check_temperatures(rules)
    _warn_of_truncation(rules)
    if rules.replays_routes and not engine.server.get(ROUTED_EXPERTS, True):
        message = removal("turns off the routes that a trainer replays")
        rules.error(ROUTED_EXPERTS, message, code="no-routed-experts")
    rules.check_sync("tensor_parallel_size", "data_parallel_size")


def _check_place(rules: ServerRules[VllmEngineSpec]) -> None:
    engine = rules.engine
    if rules.group is None:
        return
    size, per_node = engine.gpus_per_server, rules.group.slots_per_node
    larger = "data_parallel_size" if engine.attention_copies > engine.tensor_size else "tensor_parallel_size"
    if rules.group.is_cpu and size > 1:
        message = "a server on CPU slots takes one of them; leave it at 1"
        rules.error(larger, message, ("groups",), code="server-on-cpus")
    elif per_node % size:
        message = f"a server takes {size} GPUs, which do not divide the {per_node} of a machine; choose a divisor"
        rules.error(larger, message, ("groups",), code="servers-do-not-divide")


def _check_temperatures(rules: ServerRules[VllmEngineSpec]) -> None:
    for section, sampling in rules.samplings():
        temperature = sampling.temperature
        if temperature and not _LEAST_TEMPERATURE <= temperature <= _LARGEST_TEMPERATURE:
            message = f"vLLM samples at {_LEAST_TEMPERATURE} to {_LARGEST_TEMPERATURE:g}, not at {temperature:g}"
            message += "; choose a temperature between them, or 0"
            rules.findings.error((*section, "temperature"), message, code="temperature-of-server")


def _warn_of_truncation(rules: ServerRules[VllmEngineSpec]) -> None:
    """Warn of log-probs in training that belong to another distribution than the trainer's.

    vLLM computes log-probs before temperature or after truncation; training needs log-probs between the two.
    """
    rollouts = [name for name, node in rules.nodes() if isinstance(node, RolloutNode)]
    samplings = [pair for name in rollouts for pair in rules.pipeline.samplings(name, validated=False).items()]
    for section, sampling in samplings:
        given = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
        if cut := [field for field, cuts in given.items() if cuts]:
            message = "vLLM reports `rollout_logprob` after this truncation, and corrections count the difference from "
            message += "the trainer's as mismatch; hf and sglang report it before, see docs/mismatch.md"
            rules.findings.warning((*section, cut[0]), message, code="truncated-logprobs")
