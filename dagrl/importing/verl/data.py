"""verl's data and rewards."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from dagrl.importing.parts import DAPO, is_known, write_files
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ROLLOUT

_SEES = re.compile(r"[-_.]VL\b", re.IGNORECASE)
"""In the name of a model that sees, such as Qwen2.5-VL-7B-Instruct."""


def _files(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


_COLUMNS = {"data.prompt_key": "prompt_key"}


def _train(t: Translation) -> None:
    key = "data.train_files"
    write_files(t, "data.train", _files(t.get(key)), key, _COLUMNS)


def _val(t: Translation) -> None:
    key = "data.val_files"
    files = _files(t.get(key))
    if not files or (not t.given(key) and t.get("trainer.test_freq") == -1 and not t.flag("trainer.val_before_train")):
        t.imply("there is no validation", key)
    elif len(files) == 1:
        write_files(t, "data.val", files, key, _COLUMNS)
    else:
        for index, file in enumerate(files):
            path = PurePosixPath(str(file))
            stem = path.stem if path.stem not in ("test", "val", "validation") else path.parent.name
            name = "".join(c if c.isalnum() else "_" for c in stem.lower()).strip("_")
            name = name if name[:1].isalpha() and f"data.val.{name}" not in t.tree else f"set_{index}"
            write_files(t, f"data.val.{name}", [file], key, _COLUMNS)


def _overlong(t: Translation) -> None:
    filters, truncation = t.flag("data.filter_overlong_prompts"), t.get("data.truncation")
    keys = ("data.filter_overlong_prompts", "data.truncation")
    if filters:
        t.write("data.overlong_prompts", "drop", keys[0])
        t.imply("has no effect on prompts that are left out before", keys[1])
    elif truncation == "left":
        t.write("data.overlong_prompts", "cut", *keys)
    else:
        t.write("data.overlong_prompts", "error", *keys)
        if truncation != "error":
            t.refuse("prompts are cut at their beginning alone; `error` stands in", keys[1])


def _response(t: Translation) -> None:
    keys = ("data.max_response_length", f"{ROLLOUT}.response_length")
    key = keys[1] if t.given(keys[1]) else keys[0]
    t.write("nodes.rollout.sampling.max_new_tokens", t.get(key), key)
    if t.get(keys[0]) == t.tree["nodes.rollout.sampling.max_new_tokens"]:
        t.write("nodes.rollout.sampling.max_new_tokens", t.get(key), *keys)


def _prompt(t: Translation) -> None:
    keys = ("data.max_prompt_length", f"{ROLLOUT}.prompt_length")
    t.write("data.max_prompt_tokens", t.get(keys[0]), keys[0])
    if t.given(keys[1]) and t.get(keys[1]) == t.get(keys[0]):
        t.write("data.max_prompt_tokens", t.get(keys[0]), *(key for key in keys if t.given(key)))
    elif t.given(keys[1]):
        t.refuse("prompts have one bound, data.max_prompt_length's", keys[1])


def _images(t: Translation) -> None:
    """Verl reads the column `images` of any data set that has one; dagrl only where the pipeline names it."""
    key, model = "data.image_key", t.get("actor_rollout_ref.model.path")
    if t.given(key) or (isinstance(model, str) and _SEES.search(model)):
        t.write(key, t.get(key, "images"), key)


DATA = (
    joint(_train, "data.train_files data.prompt_key", always=True),
    joint(_val, "data.val_files", always=True),
    to("data.train_batch_size", "data.prompts_per_step", write_default=True),
    joint(_prompt, "data.max_prompt_length", under(ROLLOUT, "prompt_length"), always=True),
    joint(_response, "data.max_response_length", under(ROLLOUT, "response_length"), always=True),
    joint(_overlong, "data.filter_overlong_prompts data.truncation", always=True),
    to("data.shuffle", "data.order", convert=lambda shuffled: "shuffled" if shuffled else "file"),
    to("data.seed", "run.seed"),
    joint(_images, "data.image_key", always=True),
    to("data.val_max_samples", "data.val_prompts", convert=lambda count: count if count > 0 else None),
    refused_unless(-1, "the whole file is used; cut the file beforehand", "data.train_max_samples"),
    refused_unless("data_source", "the column is `data_source`; rename it", "data.reward_fn_key"),
    refused_unless((None, "null"), "rows are read as they are; prepare the file beforehand", "data.custom_cls.*"),
    refused("the chat template is called without arguments", "data.apply_chat_template_kwargs*"),
    refused(
        "is `data.order: {adaptive: {}}`, or a sampler of your own, `module:Class`, with `take` and `observe` instead "
        "of `__iter__` and `update` (docs/curriculum.md)",
        "data.sampler.*",
    ),
    refused("new prompts come from a sampler or a source of your own (docs/curriculum.md)", "data.datagen.*"),
    refused("images alone: there are neither videos nor sounds", "data.video_key"),
    implied(
        "follows from the pipeline",
        "data.return_* data.val_batch_size data.validation_shuffle data.dataloader_num_workers "
        "data.filter_overlong_prompts_workers data.trust_remote_code data.use_shm data.tokenizer "
        "data.image_patch_size",
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


REWARD = (
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
