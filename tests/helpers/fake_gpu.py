"""Objectives on fake tensors of CUDA: where they compute, and that they wait for nothing. For a process of its own.

Where Megatron runs on CPUs it has what is made for CUDA made on the CPU, in all of its process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dagrl.algorithms.dpo import DpoObjective
from dagrl.algorithms.objective import PolicyObjective
from dagrl.algorithms.sft import MixedObjective, ObservedObjective, SftObjective
from dagrl.algorithms.value_loss import ValueObjective
from dagrl.backends.base import ResponseTokens, ValueTokens
from dagrl.config.schema import LossSpec, RolloutCorrectionSpec

TOKENS, ROWS = 12, 4
OF_ROWS = {"group_id": torch.int64, "is_expert": torch.float32}
POLICIES = (
    *("ppo_clip", "gspo", "gmpo", "sapo", "topr", "cispo", "cpgd", "reinforce"),
    *("opmd", "opmd_kimi", "opmd_pairwise", "clip_cov", "kl_cov"),
    *("dppo_tv", "dppo_kl", "vespo", "fipo", "m2po", "dro"),
)
CORRECTION = {
    "rollout_is": "sequence",
    "rollout_is_threshold_lower": 0.1,
    "rollout_is_batch_normalize": True,
    "rollout_rs": "seq_max_k3",
    "rollout_rs_threshold": 0.2,
    "rollout_token_veto_threshold": 0.1,
}


def policy(form: str, *, corrected: bool = False, rejection: str = "seq_max_k3", **fields: Any) -> PolicyObjective:
    available = ("old_logprob", "ref_logprob", "rollout_logprob")
    correction = RolloutCorrectionSpec.model_validate({**CORRECTION, "rollout_rs": rejection}) if corrected else None
    return PolicyObjective(
        LossSpec.model_validate({"policy": form, "kl_coef": 0.1, "entropy_coef": 0.1, **fields}),
        1.0,
        available,
        correction=correction,
    )


OBJECTIVES: dict[str, Callable[[], Any]] = {
    **{form: (lambda form=form: policy(form)) for form in POLICIES},
    "dual_clip": lambda: policy("ppo_clip", dual_clip=3.0),
    "corrected": lambda: policy("ppo_clip", corrected=True),
    "masked": lambda: policy("fipo", dual_clip=3.0, off_policy_delta=0.1, kl_estimator="k3*"),
    "kpop": lambda: policy("ppo_clip", corrected=True, rejection="token_binary_kl"),
    "observed": lambda: ObservedObjective(policy("ppo_clip"), 0.1),
    "mix": lambda: MixedObjective(policy("ppo_clip", corrected=True), 0.1),
    "sft": lambda: SftObjective("token-mean"),
    "value": lambda: ValueObjective(cliprange=0.5, aggregation="token-mean", longest_response=8),
    **{form: (lambda form=form: DpoObjective(form, beta=0.1, sft_coef=0.1)) for form in ("sigmoid", "ipo", "hinge")},
}


def tensors_of(name: str) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Device, type, shape and whether it has a gradient, of an objective's loss and of each metric.

    A tensor of another device raises, and so does reading a number that only the device knows.
    """
    objective = OBJECTIVES[name]()
    totals = (2.0, 3.0, 4.0, 5.0) if name == "mix" else (2.0, 3.0, 4.0)
    with FakeTensorMode():
        predicted = torch.zeros(TOKENS, device="cuda", requires_grad=True)
        columns = {
            column: torch.zeros(ROWS if column in OF_ROWS else TOKENS, dtype=OF_ROWS.get(column), device="cuda")
            for column in objective.columns
        }
        weight, row = torch.ones(TOKENS, device="cuda"), torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        if name == "value":
            tokens: Any = ValueTokens(predicted, weight, columns, row)
        else:
            tokens = ResponseTokens(predicted, predicted, weight, columns, row, totals)
        loss, metrics = objective(tokens)
        return _told(loss), [_told(each) for each in metrics.values()]


def _told(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device.type, tensor.dtype, tuple(tensor.shape), tensor.requires_grad
