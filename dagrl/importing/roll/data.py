"""ROLL's data files, lengths and batch size."""

from __future__ import annotations

from pathlib import PurePosixPath

from dagrl.importing.parts import data_file, val_label
from dagrl.importing.roll.common import INFER, TRAIN
from dagrl.importing.table import Translation, joint, to, under


def _lengths(t: Translation) -> None:
    t.write("data.max_prompt_tokens", t.get("prompt_length"), "prompt_length")
    response, sequence = t.number("response_length"), t.number("sequence_length")
    if response:
        t.write("nodes.rollout.sampling.max_new_tokens", response, "response_length")
        t.imply("follows from prompt and response", "sequence_length")
    elif sequence:
        target, rest = "nodes.rollout.sampling.max_new_tokens", sequence - t.number("prompt_length")
        if rest > 0:
            t.write(target, rest, "sequence_length", note="less the prompt")
        else:
            t.note("sequence_length", target, "less the prompt it leaves no token for the response; choose both")
    t.imply(
        "has no effect: the response's length follows from `sequence_length`", f"{INFER}.generating_args.max_new_tokens"
    )


def _data(t: Translation) -> None:
    for key, target in ((f"{TRAIN}.data_args.file_name", "data.train"), ("validation.data_args.file_name", "data.val")):
        value = t.get(key)
        files = value if isinstance(value, list) else [value] if value is not None else []
        if len(files) == 1:
            t.write(target, data_file(files[0]), key, note="convert it once (docs/data.md)")
        elif files and target == "data.val":
            for index, file in enumerate(files):
                label = val_label(PurePosixPath(str(file)).stem, index)
                t.write(f"data.val.{label}", data_file(file), key, note="convert them once (docs/data.md)")
        elif files:
            t.put(target, data_file(files[0]))
            t.note(key, target, f"one file here: merge the {len(files)} files; the first one stands in")


RULES = (
    joint(
        _lengths,
        "prompt_length response_length sequence_length",
        under(INFER, "generating_args.max_new_tokens"),
        always=True,
    ),
    joint(_data, under(TRAIN, "data_args.file_name"), "validation.data_args.file_name", always=True),
    to("rollout_batch_size", "data.prompts_per_step", write_default=True),
)
