"""ROLL's ``actor_infer`` and ``validation``: the generator and its node."""

from __future__ import annotations

from dagrl.importing.engines import generator_of, library_field, server_key
from dagrl.importing.parts import has_val_data, put_node, write_val_n
from dagrl.importing.roll.common import INFER, STRATEGY
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, joint, to, under

_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Defaults of ROLL's ``generating_args``."""


def _sampling(t: Translation, prefix: str, target: str) -> None:
    for name, default in _SAMPLING.items():
        key = f"{prefix}.{name}"
        t.write(f"{target}.{name}", t.get(key, default), key)
    stops = f"{prefix}.stop_strings"
    texts = t.get(stops)
    if isinstance(texts, str | list | Unresolved):
        t.write(f"{target}.stop", [texts] if isinstance(texts, str) else texts, stops)


def _rollout(t: Translation) -> None:
    put_node(t, "rollout", "rollout", "generator")
    prefix = f"{INFER}.generating_args"
    _sampling(t, prefix, "nodes.rollout.sampling")
    t.imply("is `num_return_sequences_in_group`", f"{prefix}.num_return_sequences")
    over = "max_additional_running_prompts"
    if t.flag("is_use_additional_prompts") and t.number(over):
        prompts = t.get("rollout_batch_size") + t.get(over)
        t.write(
            "nodes.rollout.over_sampling_batch_size",
            prompts,
            "rollout_batch_size",
            over,
            note="prompts and those beyond",
        )
        t.imply("`over_sampling_batch_size` switches it on", "is_use_additional_prompts")
    else:
        t.imply("no more prompts are begun than a step needs", "is_use_additional_prompts", over)


def _validation(t: Translation) -> None:
    """ROLL validates every ``eval_steps``, and before the first step."""
    if not has_val_data(t):
        t.imply_all("there is no validation without a file")
        return
    t.write("run.validate_every", t.get("eval_steps"), "eval_steps")
    t.write("run.validate_first", True, "validation", note="ROLL validates before the first step")
    prefix = "validation.generating_args"
    if any(key.startswith(f"{prefix}.") for key in t.current):
        _sampling(t, prefix, "nodes.rollout.val_sampling")
        t.put("nodes.rollout.val_sampling.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
        write_val_n(t, f"{prefix}.num_return_sequences")
    t.imply("follows from the rollout", f"{prefix}.max_new_tokens", f"{prefix}.num_beams")


def _server(t: Translation) -> None:
    generator_of(t, f"{INFER}.strategy_args.strategy_name")
    workers = f"{INFER}.num_gpus_per_worker"
    if t.number(workers, 1) > 1:
        t.write(server_key(t, "tensor_parallel"), t.get(workers), workers)
    else:
        t.imply("one GPU a server, or as the server's own size says", workers)
    for each in t.current:
        field = each.removeprefix(f"{INFER}.{STRATEGY}").lstrip(".")
        if each.startswith(f"{INFER}.{STRATEGY}"):
            if field in ("load_format", ""):
                t.imply("weights come from the weight sync", each)
            else:
                library_field(t, each, "generator", "server", field)


RULES = (
    joint(
        _rollout,
        "is_use_additional_prompts max_additional_running_prompts",
        *(f"{INFER}.generating_args.{name}" for name in (*_SAMPLING, "stop_strings", "num_return_sequences")),
        always=True,
    ),
    to("num_return_sequences_in_group", "nodes.rollout.n", write_default=True),
    joint(_validation, "eval_steps validation.generating_args.*"),
    joint(
        _server, under(INFER, "strategy_args.strategy_name num_gpus_per_worker"), f"{INFER}.{STRATEGY}*", always=True
    ),
)
