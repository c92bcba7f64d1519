"""verl's ``data``."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from dagrl.importing.parts import data_file
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, implied, joint, refused, refused_unless, to, under
from dagrl.importing.verl.common import ROLLOUT

_SEES = re.compile(r"[-_.]VL\b", re.IGNORECASE)
"""In the name of a model that sees, such as Qwen2.5-VL-7B-Instruct."""


def _files(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _train(t: Translation) -> None:
    key = "data.train_files"
    value = t.get(key)
    files = _files(value)
    if isinstance(value, Unresolved) or len(files) < 2:
        t.write("data.train", data_file(files[0]) if files else None, key)
        return
    t.put("data.train", data_file(files[0]))
    t.note(key, "data.train", f"one file here: merge the {len(files)} files; the first one stands in")


def _val(t: Translation) -> None:
    key = "data.val_files"
    files = _files(t.get(key))
    if not files or (not t.given(key) and t.get("trainer.test_freq") == -1 and not t.flag("trainer.val_before_train")):
        t.imply("there is no validation", key)
    elif len(files) == 1:
        t.write("data.val", data_file(files[0]), key)
    else:
        for index, file in enumerate(files):
            path = PurePosixPath(str(file))
            stem = path.stem if path.stem not in ("test", "val", "validation") else path.parent.name
            name = "".join(c if c.isalnum() else "_" for c in stem.lower()).strip("_")
            name = name if name[:1].isalpha() and f"data.val.{name}" not in t.tree else f"set_{index}"
            t.write(f"data.val.{name}", data_file(file), key)


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


RULES = (
    joint(_train, "data.train_files", always=True),
    joint(_val, "data.val_files", always=True),
    to("data.train_batch_size", "data.prompts_per_step", write_default=True),
    joint(_prompt, "data.max_prompt_length", under(ROLLOUT, "prompt_length"), always=True),
    joint(_response, "data.max_response_length", under(ROLLOUT, "response_length"), always=True),
    joint(_overlong, "data.filter_overlong_prompts data.truncation", always=True),
    to("data.shuffle", "data.shuffle"),
    to("data.seed", "run.seed"),
    joint(_images, "data.image_key", always=True),
    to("data.val_max_samples", "data.val_prompts", convert=lambda count: count if count > 0 else None),
    refused_unless(-1, "the whole file is used; cut the file beforehand", "data.train_max_samples"),
    refused_unless("prompt", "the column is `prompt`; rename it", "data.prompt_key"),
    refused_unless("data_source", "the column is `data_source`; rename it", "data.reward_fn_key"),
    refused_unless((None, "null"), "rows are read as they are; prepare the file beforehand", "data.custom_cls.*"),
    refused("the chat template is called without arguments", "data.apply_chat_template_kwargs*"),
    refused("rows are drawn in the order of `data.shuffle`", "data.sampler.* data.datagen.*"),
    refused("images alone: there are neither videos nor sounds", "data.video_key"),
    implied(
        "follows from the pipeline",
        "data.return_* data.val_batch_size data.validation_shuffle data.dataloader_num_workers "
        "data.filter_overlong_prompts_workers data.trust_remote_code data.use_shm data.tokenizer "
        "data.image_patch_size",
    ),
)
