"""slime's sizes of mini-batches and micro-batches."""

from __future__ import annotations

from dagrl.importing.parts import padded_rows
from dagrl.importing.table import Translation, joint


def _mini_batch(t: Translation) -> None:
    """Slime counts samples: ``global_batch_size = rollout_batch_size x n / num_steps_per_rollout``."""
    size, steps = "--global-batch-size", "--num-steps-per-rollout"
    prompts, n = t.tree.get("data.prompts_per_step"), t.tree.get("nodes.rollout.n")
    if not isinstance(prompts, int) or not isinstance(n, int):
        return
    key, samples = (size, t.number(size)) if t.number(size) else (steps, None)
    if samples is None and t.number(steps):
        samples = prompts * n // t.number(steps)
    if samples is None:
        t.imply("one optimizer step a rollout", size, steps)
    elif samples % n:
        t.refuse(f"a mini-batch has whole groups: {samples} samples are no multiple of {n}", key)
    else:
        t.write("nodes.update.mini_batch", samples // n, key, note=f"{samples} samples / {n} of each prompt")
    t.imply("`--global-batch-size` takes its place", steps)


def _tokens(t: Translation) -> None:
    parallel = t.number("--context-parallel-size", 1)
    train, score = "--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu"
    if not t.flag("--use-dynamic-batch-size"):
        rows = t.number("--micro-batch-size", 1)
        t.imply("rows are always packed by `tokens_per_micro_batch`", "--micro-batch-size", train, score)
        padded_rows(t, "nodes.update.tokens_per_micro_batch", rows, "--micro-batch-size")
        return
    t.imply("rows are always packed by `tokens_per_micro_batch`", "--use-dynamic-batch-size", "--micro-batch-size")
    for key, nodes in ((train, ("update", "old", "ref")), (score, ("old", "ref"))):
        if t.number(key):
            tokens = t.get(key) * parallel
            note = f"x {parallel} that share each sequence" if parallel > 1 else ""
            for node in nodes:
                if node == "update" or f"nodes.{node}.op" in t.tree:
                    t.write(f"nodes.{node}.tokens_per_micro_batch", tokens, key, note=note)


RULES = (joint(_mini_batch, "--global-batch-size --num-steps-per-rollout"),)
TOKENS = (
    joint(_tokens, "--use-dynamic-batch-size --max-tokens-per-gpu --log-probs-max-tokens-per-gpu --micro-batch-size"),
)
