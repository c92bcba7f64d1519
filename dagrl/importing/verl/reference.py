"""verl's ``actor_rollout_ref.ref``: the reference."""

from __future__ import annotations

from dagrl.importing.parts import put_reference
from dagrl.importing.table import Translation, implied, joint, under
from dagrl.importing.verl.common import ACTOR, MEMORY, REF, context_parallel, is_megatron, packed_tokens


def _ref_tokens(t: Translation) -> None:
    if t.tree.get("nodes.ref.op") is None:
        t.imply_all("nothing reads log-probs of the reference")
    else:
        packed_tokens(t, "nodes.ref.tokens_per_micro_batch", REF, "log_prob_", context_parallel(t, ACTOR))


def _ref_layout(t: Translation) -> None:
    for key in t.current:
        same = key.replace(f"{REF}.", f"{ACTOR}.", 1)
        if t.get(key) == t.get(same) or t.get(key) in (None, False, True) or not is_megatron(t):
            t.imply("the reference is a frozen copy of the actor, in its layout", key)
        else:
            t.refuse("the reference is a frozen copy of the actor, in its layout", key)


RULES = (
    joint(put_reference, always=True),
    joint(
        _ref_tokens,
        under(
            REF,
            "log_prob_max_token_len_per_gpu log_prob_micro_batch_size_per_gpu "
            "log_prob_micro_batch_size log_prob_use_dynamic_bsz",
        ),
    ),
    joint(_ref_layout, under(REF, "megatron.* fsdp_config.* ulysses_sequence_parallel_size strategy")),
    implied(MEMORY, under(REF, "entropy_* use_torch_compile *")),
)
