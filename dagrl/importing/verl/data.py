"""verl's data and rewards."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from dagrl.importing import parts
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ROLLOUT

_SEES = re.compile(r"[-_.]VL\b", re.IGNORECASE)
"""Pattern in the name of a vision model, such as Qwen2.5-VL-7B-Instruct."""


_COLUMNS = {"data.prompt_key": "prompt_key"}


@joint("data.train_files data.prompt_key", always=True)
def _train(t: Translation) -> None:
    parts.write_files(t, "data.train", parts.as_list(t.get("data.train_files")), "data.train_files", _COLUMNS)


@joint("data.val_files", always=True)
def _val(t: Translation) -> None:
    key = "data.val_files"
    files = parts.as_list(t.get(key))
    if not t.given(key) and t.get("trainer.test_freq") == -1 and not t.flag("trainer.val_before_train"):
        return
    for index, file in enumerate(files):
        path = PurePosixPath(str(file))
        stem = path.stem if path.stem not in ("test", "val", "validation") else path.parent.name
        name = "".join(c if c.isalnum() else "_" for c in stem.lower()).strip("_")
        name = name if name[:1].isalpha() and f"data.val.{name}" not in t.tree else f"set_{index}"
        parts.write_files(t, "data.val" if len(files) == 1 else f"data.val.{name}", [file], key, _COLUMNS)


@joint("data.filter_overlong_prompts data.truncation", always=True)
def _overlong(t: Translation) -> None:
    keys, truncation = ("data.filter_overlong_prompts", "data.truncation"), t.get("data.truncation")
    if t.flag(keys[0]):
        t.write("data.overlong_prompts", "drop", keys[0])
        t.imply("has no effect on prompts that are left out before", keys[1])
    else:
        t.write("data.overlong_prompts", "cut" if truncation == "left" else "error", *keys)
        if truncation not in ("left", "error"):
            t.refuse("prompts are cut at their beginning alone; `error` is used instead", keys[1])


@joint("data.max_prompt_length data.max_response_length", under(ROLLOUT, "prompt_length response_length"), always=True)
def _lengths(t: Translation) -> None:
    for name, target in (("prompt", "data.max_prompt_tokens"), ("response", "nodes.rollout.sampling.max_new_tokens")):
        usual, own = f"data.max_{name}_length", f"{ROLLOUT}.{name}_length"
        same = t.given(own) and t.get(own) == t.get(usual)
        key = own if name == "response" and t.given(own) else usual
        t.write(target, t.get(key), *((usual, own) if same else (key,)))
        if not same and key != own:
            t.refuse("prompts have one bound, data.max_prompt_length's", own)


@joint("data.image_key", always=True)
def _images(t: Translation) -> None:
    """Verl reads the column `images` of any data set that has one; dagrl only if the pipeline names it."""
    key, model = "data.image_key", t.get("actor_rollout_ref.model.path")
    if t.given(key) or (isinstance(model, str) and _SEES.search(model)):
        t.copy(key, key, "images")


DATA = (
    _train,
    _val,
    to("data.train_batch_size", "data.prompts_per_step", write_default=True),
    _lengths,
    _overlong,
    to("data.shuffle", "data.order", convert=lambda shuffled: "shuffled" if shuffled else "file"),
    to("data.seed", "run.seed"),
    _images,
    to("data.val_max_samples", "data.val_prompts", convert=lambda count: count if count > 0 else None),
    refused_unless(-1, "the whole file is used; cut the file beforehand", "data.train_max_samples"),
    refused_unless("data_source", "the column is `data_source`; rename it", "data.reward_fn_key"),
    refused_unless("null", "rows are read as they are; prepare the file beforehand", "data.custom_cls.*"),
    refused("the chat template is called without arguments", "data.apply_chat_template_kwargs*"),
    refused(
        "is `data.order: {adaptive: {}}`, or your own sampler, `module:Class`, with `take` and `observe` instead "
        "of `__iter__` and `update` (docs/curriculum.md)",
        "data.sampler.*",
    ),
    refused("new prompts need your own sampler or source (docs/curriculum.md)", "data.datagen.*"),
    refused("images alone: there are neither videos nor sounds", "data.video_key"),
    implied(
        "follows from the pipeline",
        under(
            "data",
            "return_* val_batch_size validation_shuffle dataloader_num_workers filter_overlong_prompts_workers "
            "trust_remote_code use_shm tokenizer image_patch_size",
        ),
    ),
)


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
"""Patterns in the names of data sets of programs, and of data sets with rewards of 1 and -1."""


@joint(*(under(prefix, "path name") for prefix in _FUNCTIONS), always=True)
def _function(t: Translation) -> None:
    target, files = "nodes.reward.fn", f"{t.get('data.train_files')} {t.get('data.val_files')}"
    t.put("nodes.reward.op", "reward")
    own = next((prefix for prefix in _FUNCTIONS if t.get(f"{prefix}.path") is not None), None)
    if own:
        function = f"{PurePosixPath(str(t.get(f'{own}.path'))).stem}:{t.get(f'{own}.name')}"
        note = "beside the pipeline, as it is: verl's names of parameters are understood (docs/migration.md)"
        t.write(target, function, f"{own}.path", f"{own}.name", note=note)
    elif _CODE.search(str(t.get("data.train_files"))):
        reason = (
            "its name is that of code, which verl scores by `data_source`: `code`, or your own; math is used instead"
        )
        t.put(target, "math")
        t.note(target, target, reason, t.tree.get("data.train"))
    else:
        note = "verl chooses by `data_source`: mathematics for gsm8k, MATH, AIME and DAPO; else take code, or your own"
        note += parts.DAPO if _DAPO.search(files) else ""
        t.write(target, "math", "default_compute_score", note=note)
    for name in [name for name in t.tree.get("nodes.advantage.rewards", ()) if name != "reward"]:
        node, module = f"nodes.{name}", str(t.tree[target]).partition(":")[0]
        for option, value in (("op", "reward"), ("fn", f"{module}:{name}"), ("write", name)):
            t.put(f"{node}.{option}", value)
        reason = "write a function that returns this reward alone: there, `compute_score` returns all of them"
        t.note(f"{node}.fn", f"{node}.fn", reason, name)
    if "nodes.baseline.op" in t.tree:
        t.put("nodes.baseline.fn", t.tree[target])
        for node in ("reward", "old", "ref", "advantage", "held", "update"):
            if f"nodes.{node}.op" in t.tree or node == "update":
                t.put(f"nodes.{node}.read_from", ["rollout"])


@joint(*(f"{prefix}.*" for prefix in _BUFFERS))
def _buffer(t: Translation) -> None:
    target = "nodes.advantage.overlong_buffer"
    for prefix in _BUFFERS:
        if t.flag(f"{prefix}.enable"):
            t.write(f"{target}.len", t.get(f"{prefix}.len"), f"{prefix}.len")
            t.copy(f"{prefix}.penalty_factor", f"{target}.penalty_factor", 1.0)


@joint("reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len")
def _max_length(t: Translation) -> None:
    for key in t.current:
        if t.get(key) == t.tree.get("nodes.rollout.sampling.max_new_tokens"):
            t.imply("the penalty ends at `max_new_tokens`", key)
        else:
            t.refuse("the penalty ends at `max_new_tokens`", key)


@joint("reward_model.* reward.reward_model.* reward_model.enable")
def _model(t: Translation) -> None:
    for prefix in ("reward_model", "reward.reward_model"):
        if not t.flag(f"{prefix}.enable"):
            continue
        path = f"{prefix}.model.path" if t.given(f"{prefix}.model.path") else f"{prefix}.model_path"
        t.write("engines.reward_model.model.path", t.get(path), path)
        t.put("engines.reward_model.backend", "hf")
        t.put("engines.reward_model.head", "reward")
        t.put("engines.reward_model.group", next(key.split(".")[1] for key in t.tree if key.startswith("groups.")))
        t.put("nodes.reward.engine", "reward_model")
        t.tree.pop("nodes.reward.fn", None)
        t.write("nodes.reward.op", "reward_model", f"{prefix}.enable")
        rest = (key for key in t.rest() if key.startswith(f"{prefix}."))
        t.refuse("`engines.reward_model` scores with a head, in transformers (docs/critic.md)", *rest)


@joint("reward_model.reward_manager reward.reward_manager.* reward.reward_manager")
def _manager(t: Translation) -> None:
    for key in t.current:
        if t.get(key) == "batch":
            t.refuse("the function gets lists: decorate it with `@dagrl.reward(batched=True)` (docs/rewards.md)", key)
        elif t.get(key) not in (None, "naive", "dapo", "gdpo", "register", "custom_reward_manager"):
            t.refuse("rewards are functions of a row: `nodes.reward.fn`", key)


REWARD = (
    _function,
    _buffer,
    _max_length,
    _manager,
    refused(
        "arguments of the function are `nodes.reward.args`",
        "reward_model.reward_kwargs.*",
        *(f"{prefix}.reward_kwargs*" for prefix in _FUNCTIONS),
    ),
    refused("code runs in dagrl's sandbox: `fn: code` (docs/rewards.md)", "*sandbox_fusion*"),
    implied(
        "rewards are computed on the host by `run.host_workers`",
        "reward_model.num_workers reward_model.launch_reward_fn_async reward_model.reward_loop*",
    ),
    _model,
    implied("is null, as by default", *_FUNCTIONS),
)
