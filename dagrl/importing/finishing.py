"""Adjusts a translated pipeline to dagrl's rules, after all other rules of a framework.

Each value that dagrl cannot use as given is removed, raised, or listed for the user to decide.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any

from dagrl.backends.megatron.layout_rules import rank_faults
from dagrl.backends.megatron.section import ParallelSpec
from dagrl.config.schema import GroupSpec
from dagrl.config.schema.nodes.advantage import AdvantageNode
from dagrl.config.schema.nodes.base import PackingNode
from dagrl.importing.engines import PARALLEL, server_key
from dagrl.importing.table import Status, Translation, joint
from dagrl.validation.unused_options import OF_ESTIMATORS, OF_LOSSES

_PACKS = ("logprob", "update", "values", "critic")
"""Ops that pack samples into micro-batches."""

_PLAIN = re.compile(r"gsm-?8k", re.IGNORECASE)
"""Pattern in the name of a file whose references are plain numbers."""
_FILE = re.compile(r"data\.(train|val)(\.(?!prompt_key|answer_key)\w+(\.path)?)?")
_VAL_N = re.compile(r"nodes\.rollout\.val_n|data\.val\.\w+\.n")
_STRICT = "`strict`: references are plain numbers, and a sum that is not computed is no answer (docs/rewards.md)"


def _drop_foreign_options(t: Translation) -> None:
    """Remove options that the loss or the estimator lacks; they have no effect in the source framework either."""
    for section, form, table in (
        ("nodes.update.loss", t.tree.get("nodes.update.loss.policy", "ppo_clip"), OF_LOSSES),
        ("nodes.advantage", t.tree.get("nodes.advantage.estimator"), OF_ESTIMATORS),
    ):
        for option, forms in table.items():
            if f"{section}.{option}" in t.tree and form not in forms:
                t.drop(f"{section}.{option}", f"has no effect on `{form}`")


def _list_single_response(t: Translation) -> None:
    target, estimator = "nodes.rollout.n", t.tree.get("nodes.advantage.estimator")
    node = AdvantageNode.model_validate({"op": "advantage", "estimator": estimator or "gae"})
    if t.tree.get(target, 1) == 1 and "group_id" in node.contract().reads:
        _list(t, target, f"{estimator} compares the responses to a prompt: 2 or more")
    if t.tree.get(target, 1) == 1 and "nodes.keep.op" in t.tree and "nodes.keep.fn" not in t.tree:
        _list(t, "nodes.keep", "a filter compares the responses to a prompt: 2 or more")


def _read_generators_log_probs(t: Translation) -> None:
    """Make a divergence in reward or advantage read the generator's log-probs if the trainer computes none."""
    divergences = ("nodes.advantage.kl_in_reward.", "nodes.advantage.distillation.")
    if any(key.startswith(divergences) for key in t.tree) and "nodes.old.op" not in t.tree:
        t.put("nodes.advantage.read", {"old_logprob": "rollout_logprob"})


def _fit_batches(t: Translation) -> None:
    """Remove sizes that a step does not reach, and list mini-batches that do not divide it."""
    prompts = t.tree.get("data.prompts_per_step")
    if not isinstance(prompts, int):
        return
    for target in ("nodes.update.mini_batch", "nodes.critic.mini_batch"):
        size = t.tree.get(target)
        if not isinstance(size, int) or size < 1:
            continue
        if size > prompts:
            t.drop(target, f"all {prompts} prompts of a step are one mini-batch")
        elif prompts % size:
            _list(t, target, f"does not divide the {prompts} prompts of a step")
    over, partial = "nodes.rollout.over_sampling_batch_size", "nodes.rollout.partial_rollout"
    if isinstance(t.tree.get(over), int) and t.tree[over] <= prompts:
        t.drop(over, f"is no more than the {prompts} prompts of a step")
    if over not in t.tree:
        for target in (partial, "nodes.rollout.mask_offpolicy_in_partial_rollout"):
            t.drop(target, "no response is left unfinished, as a step waits for all prompts")


def _drop_without_effect(t: Translation) -> None:
    """Drop values that disable an option, and list values with which the policy does not learn."""
    for target in ("run.save_every", "run.validate_every"):
        if _number(t, target) < 1:
            t.drop(target, "never")
    for target in [key for key in t.tree if key.endswith("sampling.top_k") and t.tree[key] == 0]:
        t.drop(target, "all tokens, as by default")
    if "nodes.critic.op" not in t.tree:
        t.drop("nodes.update.critic_warmup", "there is no critic with this estimator")
    if t.tree.get("nodes.rollout.sampling.temperature") == 0 and not t.tree.get("run.val_only"):
        _list(t, "nodes.rollout.sampling.temperature", "at 0 all responses to a prompt are equal; choose more")
    if _number(t, "run.steps") < 1 and not t.tree.get("run.val_only"):
        _list(t, "run.steps", "nothing is trained; choose a number of steps")
    if t.tree.get("nodes.advantage.estimator") == "gigpo" and "nodes.rollout.tools" not in t.tree:
        _list(t, "nodes.advantage.estimator", "compares turns, and responses have one without tools or an environment")


def _drop_equal_responses(t: Translation) -> None:
    """Drop the number of validation responses if decoding is greedy, as all responses would be equal."""
    for target in [key for key in t.tree if _VAL_N.fullmatch(key)]:
        section = target.removesuffix("n") + "sampling"
        sampled = any(key.startswith(f"{section}.") for key in t.tree)
        if t.tree[target] != 1 and (not sampled or t.tree.get(f"{section}.temperature") == 0):
            t.drop(target, "the likeliest response is the same each time")
            if target.startswith("data."):  # A set without its own number uses the rollout's.
                t.put(target, 1)


def _list_layouts(t: Translation) -> None:
    """List sizes of trainers that do not fit the ranks of their group, and remove chunks without stages."""
    for engine in ("actor", "critic"):
        section = f"engines.{engine}.parallel."
        chunks, stages = f"{section}{PARALLEL[2]}", f"{section}{PARALLEL[1]}"
        if t.tree.get(stages, 1) == 1 or t.tree.get(chunks) == 1:
            t.drop(chunks, "layers are in chunks on several stages only, of two chunks or more")
        name, sizes = str(t.tree.get(f"engines.{engine}.group")), _section(t, section)
        with suppress(ValueError, ZeroDivisionError):  # A size is invalid; the validation of the pipeline reports it.
            for size, fault in [*rank_faults(ParallelSpec(**sizes), GroupSpec(**_section(t, f"groups.{name}.")), name)]:
                _list(t, f"{section}{size}", fault)
        experts, tensor = f"{section}{PARALLEL[4]}", f"{section}{PARALLEL[0]}"
        split = f"{section}sequence_parallel"
        if t.tree.get(experts, 1) > 1 and t.tree.get(tensor, 1) > 1 and not t.tree.get(split):
            _list(t, split, "Megatron shares a model with experts out over tensor-parallel ranks only if this is true")


def _section(t: Translation, prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in t.tree.items() if key.startswith(prefix)}


def _list_large_server(t: Translation) -> None:
    """List a server whose GPUs do not divide those of a machine, or of the group; SGLang's may span whole machines."""
    group, is_sglang = (
        f"groups.{t.tree.get('engines.generator.group')}",
        t.tree["engines.generator.backend"] == "sglang",
    )
    other = "engines.generator.server." + ("pp_size" if is_sglang else "data_parallel_size")
    sizes = {target: t.tree.get(target, 1) for target in (server_key(t, "tensor_parallel"), other)}
    machine, nodes = t.tree.get(f"{group}.gpus_per_node"), t.tree.get(f"{group}.nodes", 1)
    if not all(isinstance(item, int) and item > 0 for item in (machine, nodes, *sizes.values())):
        return
    size = math.prod(sizes.values())
    if machine % size and not (is_sglang and size % machine == 0 and (nodes * machine) % size == 0):
        reason = f"a server takes {size} GPUs, no divisor of the {machine} of a machine"
        _list(t, max(sizes, key=lambda target: sizes[target]), reason)


def _fit_copies(t: Translation) -> None:
    """Drop copies that an SGLang server does not support, and list sizes that do not divide its GPUs."""
    server = "engines.generator.server."
    tensor, copies = t.tree.get(f"{server}tp_size", 1), f"{server}dp_size"
    attention = f"{server}enable_dp_attention"
    if t.tree.get(copies, 1) != 1 and not t.tree.get(attention):
        t.drop(copies, "copies in a server cannot take new weights; further servers are copies", Status.REFUSED)
    if t.tree.get(copies, 1) == 1:
        t.drop(attention, "there are no copies of attention to spread")
    for target in (copies, f"{server}ep_size"):
        size = t.tree.get(target, 1)
        if isinstance(size, int) and isinstance(tensor, int) and (size < 1 or tensor % size):
            _list(t, target, f"does not divide the {tensor} tensor-parallel ranks of a server")
    if isinstance(tensor, int) and tensor < 1:
        _list(t, f"{server}tp_size", "a server has fewer GPUs than stages")


def _fit_lengths(t: Translation) -> None:
    """Raise micro-batches and the server's context to the longest sample, which is rare in the source framework."""
    prompt, response = t.tree.get("data.max_prompt_tokens"), t.tree.get("nodes.rollout.sampling.max_new_tokens")
    if not isinstance(prompt, int) or not isinstance(response, int):
        return
    longest = prompt + response
    nodes = [
        key.removesuffix("op") for key, op in t.tree.items() if re.fullmatch(r"nodes\.\w+\.op", key) and op in _PACKS
    ]
    for target in (f"{node}tokens_per_micro_batch" for node in nodes):
        tokens = t.tree.get(target, PackingNode.model_fields["tokens_per_micro_batch"].default)
        if isinstance(tokens, int) and tokens < longest:
            sizes = [t.tree.get(f"engines.actor.parallel.{name}", 1) for name in (PARALLEL[0], PARALLEL[3])]
            multiple = 2 * math.prod(size for size in sizes if isinstance(size, int))
            keys = [setting.key for setting in t.origins.get(target, ())] or [target]
            t.write(target, -(-longest // multiple) * multiple, *keys, note="holds the longest sample")
    target = server_key(t, "length")
    if isinstance(t.tree.get(target), int) and t.tree[target] < longest:
        reason = f"the longest sample has {longest} tokens; the server takes the model's own length"
        t.drop(target, reason, Status.REFUSED)


def _strict_math(t: Translation) -> None:
    """Make the mathematical reward strict if all references are numbers: otherwise it accepts sums such as 9+9."""
    files = {
        key: value if isinstance(value, list) else [value] for key, value in t.tree.items() if _FILE.fullmatch(key)
    }
    plain = {key for key, named in files.items() if all(_PLAIN.search(str(file)) for file in named)}
    training = {key for key in files if key.startswith("data.train")}
    for node in ("reward", "baseline"):
        target = f"nodes.{node}.args.strict"
        if t.tree.get(f"nodes.{node}.fn") != "math" or not training or not training <= plain:
            continue
        if plain == set(files):
            keys = [setting.key for key in training for setting in t.origins[key]]
            t.write(target, True, *keys, note=_STRICT)
        else:
            t.note(target, target, "set it if all references are plain numbers, as in gsm8k (docs/rewards.md)")


def _number(t: Translation, target: str) -> float:
    """The value of a key of the pipeline if it is a number, else 1."""
    value = t.tree.get(target)
    return value if isinstance(value, int | float) else 1


def _list(t: Translation, target: str, reason: str) -> None:
    keys = [setting.key for setting in t.origins.get(target, ())]
    t.note(keys[0] if keys else target, target, reason, t.tree.get(target))


@joint(always=True)
def finish(t: Translation) -> None:
    _drop_foreign_options(t)
    _list_single_response(t)
    _list_layouts(t)
    _read_generators_log_probs(t)
    _fit_batches(t)
    _drop_without_effect(t)
    _strict_math(t)
    _drop_equal_responses(t)
    if "engines.generator.backend" in t.tree:
        _list_large_server(t)
        _fit_copies(t)
        _fit_lengths(t)
