"""ROLL's sizes of mini-batches and micro-batches."""

from __future__ import annotations

import math

from dagrl.importing.engines import PARALLEL
from dagrl.importing.roll.common import CRITIC, INFER, REFERENCE, STRATEGY, TRAIN, devices_of
from dagrl.importing.table import Translation, joint, to, under


def _mini_batch(t: Translation) -> None:
    """Samples of an optimizer step: rows of a GPU x accumulation x data-parallel ranks; divided by ``n``, prompts."""
    rows, accumulation = (
        f"{TRAIN}.training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    n, prompts = t.number("num_return_sequences_in_group", 1), t.number("rollout_batch_size", 128)
    sizes = [t.number(f"{TRAIN}.{STRATEGY}.{name}", 1) for name in (PARALLEL[0], PARALLEL[1], PARALLEL[3])]
    ranks = max(1, len(devices_of(t, TRAIN))) // math.prod(sizes) or 1
    samples = t.number(rows, 1) * t.number(accumulation, 1) * ranks
    if not t.given(rows) and not t.given(accumulation):
        return
    if samples >= prompts * n:
        t.imply("one optimizer step a batch", rows, accumulation)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", rows, accumulation)
    else:
        note = f"{samples} samples on {ranks} data-parallel ranks / {n} of each prompt"
        t.write("nodes.update.mini_batch", samples // n, rows, accumulation, note=note)


def optimizer_steps(t: Translation) -> int:
    """Return the optimizer steps of a step."""
    mini = t.tree.get("nodes.update.mini_batch")
    return -(-int(t.number("rollout_batch_size", 128)) // mini) if isinstance(mini, int) else 1


def _tokens(t: Translation) -> None:
    """Micro-batches are packed; rows of a GPU bound them where ROLL pads."""
    for role, node in ((TRAIN, "update"), (CRITIC, "critic")):
        if f"nodes.{node}.op" not in t.tree:
            continue
        packed = [
            f"{role}.max_tokens_per_microbatch_in_train",
            f"{role}.sequence_packing_args.max_packed_sequence_length_train",
        ]
        key = next((each for each in packed if t.number(each)), None)
        if key:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    for role, node in ((TRAIN, "old"), (REFERENCE, "ref")):
        packed = [
            f"{role}.max_tokens_per_microbatch_in_infer",
            f"{role}.sequence_packing_args.max_packed_sequence_length_forward",
        ]
        key = next((each for each in packed if t.number(each)), None)
        if key and f"nodes.{node}.op" in t.tree:
            t.write(f"nodes.{node}.tokens_per_micro_batch", t.get(key), key)
    t.imply("rows are always packed by `tokens_per_micro_batch`", *(key for key in t.current if not t.is_recorded(key)))


RULES = (
    joint(
        _mini_batch, under(TRAIN, "training_args.per_device_train_batch_size training_args.gradient_accumulation_steps")
    ),
    to("ppo_epochs", "nodes.update.epochs"),
)
TOKENS = (
    joint(
        _tokens,
        *(
            f"{role}.{name}"
            for role in (TRAIN, REFERENCE, CRITIC, INFER)
            for name in (
                *(
                    "max_tokens_per_microbatch_in_train",
                    "max_tokens_per_microbatch_in_infer",
                    "sequence_packing_args.*",
                ),
                *("use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing"),
                *("sequence_length_round_in_train", "sequence_length_round_in_infer", "infer_batch_size"),
            )
        ),
    ),
)
