"""verl's ``reward``, ``reward_model`` and ``custom_reward_function``."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from dagrl.importing.parts import DAPO, is_known
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused

_FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
_BUFFERS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer_cfg",
)
_CODE = re.compile(
    r"(?<![a-z])(code|apps|taco|codeforces|codecontests|livecodebench|lcb|mbpp|humaneval)", re.IGNORECASE
)
_DAPO = re.compile(r"dapo|aime", re.IGNORECASE)
"""In the names of data sets of programs, and of those whose rewards are 1 and -1."""
_MODELS = ("reward_model", "reward.reward_model")


def _function(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    for prefix in _FUNCTIONS:
        path, name = t.get(f"{prefix}.path"), t.get(f"{prefix}.name")
        if isinstance(path, Unresolved) or is_known(path):
            module = PurePosixPath(str(path)).stem
            note = "beside the pipeline, as it is: verl's names of parameters are understood (docs/migration.md)"
            t.write("nodes.reward.fn", f"{module}:{name}", f"{prefix}.path", f"{prefix}.name", note=note)
            break
    else:
        t.imply_all("there is no function of your own")
        data = f"{t.get('data.train_files')} {t.get('data.val_files')}"
        if _CODE.search(str(t.get("data.train_files"))):
            reason = "its name is that of code, which verl scores by `data_source`: `code`, or your own; math stands in"
            t.put("nodes.reward.fn", "math")
            t.note("nodes.reward.fn", "nodes.reward.fn", reason, t.tree.get("data.train"))
        else:
            note = (
                "verl chooses by `data_source`: mathematics for gsm8k, MATH, AIME and DAPO; else take code, or your own"
            )
            t.write(
                "nodes.reward.fn", "math", "default_compute_score", note=f"{note}{DAPO if _DAPO.search(data) else ''}"
            )
    if "nodes.baseline.op" in t.tree:
        t.put("nodes.baseline.fn", t.tree["nodes.reward.fn"])
        for node in ("reward", "old", "ref", "advantage", "held", "update"):
            if f"nodes.{node}.op" in t.tree or node in ("reward", "update"):
                t.put(f"nodes.{node}.read_from", ["rollout"])


def _buffer(t: Translation) -> None:
    for prefix in _BUFFERS:
        keys = [key for key in t.current if key.startswith(f"{prefix}.")]
        if not keys:
            continue
        if not t.flag(f"{prefix}.enable"):
            t.imply("there is no penalty on length", *keys)
            continue
        t.imply("`overlong_buffer` switches it on", f"{prefix}.enable")
        t.write("nodes.advantage.overlong_buffer.len", t.get(f"{prefix}.len"), f"{prefix}.len")
        factor = f"{prefix}.penalty_factor"
        t.write("nodes.advantage.overlong_buffer.penalty_factor", t.get(factor, 1.0), factor)
        t.imply("is measured as `reward/` of the step", f"{prefix}.log")


def _max_length(t: Translation) -> None:
    for key in t.current:
        if t.get(key) == t.tree.get("nodes.rollout.sampling.max_new_tokens"):
            t.imply("the penalty ends at `max_new_tokens`", key)
        else:
            t.refuse("the penalty ends at `max_new_tokens`", key)


def _model(t: Translation) -> None:
    for prefix in _MODELS:
        keys = [key for key in t.current if key.startswith(f"{prefix}.")]
        path = f"{prefix}.model.path" if t.given(f"{prefix}.model.path") else f"{prefix}.model_path"
        if not t.flag(f"{prefix}.enable"):
            t.imply("there is no reward model", *keys)
            continue
        t.write("engines.reward_model.model.path", t.get(path), path)
        t.put("engines.reward_model.backend", "hf")
        t.put("engines.reward_model.head", "reward")
        t.put("engines.reward_model.group", next(key.split(".")[1] for key in t.tree if key.startswith("groups.")))
        t.put("nodes.reward.op", "reward_model")
        t.put("nodes.reward.engine", "reward_model")
        t.tree.pop("nodes.reward.fn", None)
        t.write("nodes.reward.op", "reward_model", f"{prefix}.enable")
        rest = [key for key in keys if not t.is_recorded(key)]
        t.refuse("`engines.reward_model` scores with a head, in transformers (docs/critic.md)", *rest)


def _manager(t: Translation) -> None:
    for key in t.current:
        if t.get(key) in (None, "naive", "dapo", "register", "custom_reward_manager"):
            t.imply("rewards are computed row by row", key)
        elif t.get(key) == "batch":
            t.refuse("the function gets lists: decorate it with `@dagrl.reward(batched=True)` (docs/rewards.md)", key)
        else:
            t.refuse("rewards are functions of a row: `nodes.reward.fn`", key)


RULES = (
    joint(_function, *(f"{prefix}.{name}" for prefix in _FUNCTIONS for name in ("path", "name")), always=True),
    joint(_buffer, *(f"{prefix}.*" for prefix in _BUFFERS)),
    joint(_max_length, "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len"),
    joint(_manager, "reward_model.reward_manager reward.reward_manager.* reward.reward_manager"),
    refused(
        "arguments of the function are `nodes.reward.args`",
        "reward_model.reward_kwargs.*",
        *(f"{prefix}.reward_kwargs*" for prefix in _FUNCTIONS),
    ),
    refused("code runs in a sandbox of its own: `fn: code` (docs/rewards.md)", "*sandbox_fusion*"),
    implied(
        "rewards are computed on the host by `run.host_workers`",
        "reward_model.num_workers reward_model.launch_reward_fn_async reward_model.reward_loop*",
    ),
    joint(_model, "reward_model.* reward.reward_model.* reward_model.enable"),
    implied("is null, as by default", *_FUNCTIONS),
)
