"""ROLL's data, generator and run."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from dagrl.importing import engines, parts
from dagrl.importing.roll.common import INFER, STRATEGY, TRAIN
from dagrl.importing.table import Translation, joint, to, under


@joint("prompt_length response_length sequence_length", f"{INFER}.generating_args.max_new_tokens", always=True)
def _lengths(t: Translation) -> None:
    target = "nodes.rollout.sampling.max_new_tokens"
    t.copy("prompt_length", "data.max_prompt_tokens")
    response, sequence = t.number("response_length"), t.number("sequence_length")
    if response:
        t.copy("response_length", target)
        t.imply("follows from prompt and response", "sequence_length")
    elif sequence:
        rest = sequence - t.number("prompt_length")
        if rest > 0:
            t.write(target, rest, "sequence_length", note="less the prompt")
        else:
            t.note("sequence_length", target, "less the prompt it leaves no token for the response; choose both")


_CONVERT = "convert them once (docs/data.md)"


@joint(under(TRAIN, "data_args.file_name data_args.domain_interleave_probs.*"), always=True)
def _train(t: Translation) -> None:
    """Files of domains become sources if each file's name has its domain; otherwise they become one source."""
    key, probs = f"{TRAIN}.data_args.file_name", f"{TRAIN}.data_args.domain_interleave_probs"
    files = parts.as_list(t.get(key))
    weights = {domain.rpartition(".")[2]: t.get(domain) for domain in t.below(probs)}
    by_domain = {name: [file for file in files if _is_of(file, name)] for name in weights}
    if not files:
        return
    if len(weights) > 1 and all(by_domain.values()) and sum(map(len, by_domain.values())) == len(files):
        for name, mine in by_domain.items():
            paths = [parts.parquet_file(file) for file in mine]
            t.write(f"data.train.{name}.path", paths if len(paths) > 1 else paths[0], key, note=_CONVERT)
            t.write(f"data.train.{name}.weight", weights[name], f"{probs}.{name}")
        return
    parts.write_files(t, "data.train", [parts.parquet_file(file) for file in files], key, note=_CONVERT)
    if len(weights) > 1:
        reason = "files hold several domains: write one for each, and name them in `data.train` with these weights"
        t.refuse(reason, *t.below(probs))


def _is_of(file: object, domain: str) -> bool:
    """Whether the name of a file begins like a domain: ``math_deepmath.jsonl`` and ``math_rule``."""
    return PurePosixPath(str(file)).stem.lower().split("_")[0] == domain.lower().split("_")[0]


@joint("validation.data_args.file_name")
def _val(t: Translation) -> None:
    (key,) = t.current
    files = parts.as_list(t.get(key))
    for index, file in enumerate(files):
        label = "" if len(files) == 1 else f".{parts.val_label(PurePosixPath(str(file)).stem, index)}"
        t.write(f"data.val{label}", parts.parquet_file(file), key, note=_CONVERT)


DATA = (_lengths, _train, _val, to("rollout_batch_size", "data.prompts_per_step", write_default=True))


_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Defaults of ROLL's ``generating_args``."""


def _sampling(t: Translation, prefix: str, target: str) -> None:
    for name, default in _SAMPLING.items():
        t.copy(f"{prefix}.{name}", f"{target}.{name}", default)
    stops = t.get(f"{prefix}.stop_strings")
    if stops is not None:
        t.write(f"{target}.stop", [stops] if isinstance(stops, str) else stops, f"{prefix}.stop_strings")


@joint(
    "is_use_additional_prompts max_additional_running_prompts",
    under(f"{INFER}.generating_args", "temperature top_p top_k stop_strings num_return_sequences"),
    always=True,
)
def _rollout(t: Translation) -> None:
    parts.put_node(t, "rollout", "rollout", "generator")
    _sampling(t, f"{INFER}.generating_args", "nodes.rollout.sampling")
    over, target = "max_additional_running_prompts", "nodes.rollout.over_sampling_batch_size"
    if t.flag("is_use_additional_prompts") and t.number(over):
        prompts = t.get("rollout_batch_size") + t.get(over)
        t.write(target, prompts, "rollout_batch_size", over, note="prompts and those beyond")


@joint("eval_steps validation.generating_args.*")
def _validation(t: Translation) -> None:
    """ROLL validates every ``eval_steps``, and before the first step."""
    if not parts.has_val_data(t):
        return
    t.copy("eval_steps", "run.validate_every")
    t.write("run.validate_first", True, "validation", note="ROLL validates before the first step")
    prefix, target = "validation.generating_args", "nodes.rollout.val_sampling"
    if t.below(prefix):
        _sampling(t, prefix, target)
        t.put(f"{target}.max_new_tokens", t.tree["nodes.rollout.sampling.max_new_tokens"])
        parts.write_val_n(t, f"{prefix}.num_return_sequences")


@joint(under(INFER, "strategy_args.strategy_name num_gpus_per_worker"), f"{INFER}.{STRATEGY}*", always=True)
def _server(t: Translation) -> None:
    engines.generator_of(t, f"{INFER}.strategy_args.strategy_name")
    workers = f"{INFER}.num_gpus_per_worker"
    t.copy(workers, engines.server_key(t, "tensor_parallel"), above=1)
    for key in t.below(f"{INFER}.{STRATEGY}"):
        field = key.removeprefix(f"{INFER}.{STRATEGY}.")
        if field == "load_format":
            t.imply("weights come from the weight sync", key)
        else:
            engines.library_field(t, key, "generator", "server", field)


ROLLOUT = (
    _rollout,
    to("num_return_sequences_in_group", "nodes.rollout.n", write_default=True),
    _validation,
    _server,
)


@joint("async_generation_ratio")
def _ahead(t: Translation) -> None:
    ratio = t.number("async_generation_ratio", 0)
    if ratio:
        t.write("schedule.max_staleness", math.ceil(ratio), "async_generation_ratio", note="whole steps")
        t.put("engines.generator.weight_sync.pause", "in_place")


RUN = (
    parts.named("exp_name"),
    _ahead,
    to("seed", "run.seed"),
    to("max_steps", "run.steps", write_default=True),
    to("save_steps", "run.save_every", write_default=True),
    parts.kept("max_ckpt_to_keep"),
    parts.tracked(
        "track_with",
        project="tracker_kwargs.project",
        name="tracker_kwargs.name",
        entity="tracker_kwargs.workspace",
    ),
    to("rpc_timeout", "run.node_timeout_s", convert=float),
)
