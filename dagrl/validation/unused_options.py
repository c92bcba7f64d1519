"""Options that have an effect only with another option, or with some of its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    AdvantageNode,
    AgentSpec,
    BufferNode,
    CovarianceNode,
    DataSpec,
    DpoNode,
    FilterNode,
    JudgeNode,
    KlInRewardSpec,
    LogprobNode,
    LossDistillationSpec,
    LossSpec,
    McpServerSpec,
    Pipeline,
    ProfileSpec,
    RolloutCorrectionSpec,
    RolloutNode,
    Section,
    TrackerSpec,
)
from dagrl.config.schema.nodes.base import EndpointNode
from dagrl.config.schema.nodes.distillation import CandidateDivergence

OF_ESTIMATORS = {
    "normalize_by_std": ("grpo", "gigpo", "gdpo", "grpo_passk"),
    "rewards": ("gdpo",),
    "k": ("passk",),
    "role": ("rae",),
    "decay": ("rae",),
    "gamma": ("gae", "gigpo", "agentic_reinforce"),
    "step_coef": ("gigpo",),
    "mean_over": ("gigpo",),
    "lam": ("gae",),
    "lam_value": ("gae",),
    "length_adaptive_alpha": ("gae",),
    "baseline": ("opmd",),
    "tau": ("opmd",),
}
_CLIPPED = ("ppo_clip", "gspo", "gmpo", "cispo", "cpgd", "clip_cov", "dppo_tv", "dppo_kl", "fipo")
OF_LOSSES = {
    "clip_ratio": _CLIPPED,
    "clip_ratio_high": _CLIPPED,
    "dual_clip": ("ppo_clip", "fipo"),
    "ratio_cap": ("dppo_tv", "dppo_kl"),
    "drift_coef": ("cpgd",),
    "kl_cov_coef": ("kl_cov",),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "tau": ("opmd", "opmd_kimi", "opmd_pairwise", "dro"),
    **dict.fromkeys(("half_life", "future_low", "future_high", "future_safety"), ("fipo",)),
    **dict.fromkeys(("k_pos", "k_neg", "lambda_pos", "lambda_neg"), ("vespo",)),
}
_ONLINE = ("wandb", "swanlab")
OF_TRACKERS = {"project": (*_ONLINE, "mlflow"), "entity": _ONLINE, "group": _ONLINE, "name": (*_ONLINE, "mlflow")}
_ONLY_WITH_VALUE: tuple[tuple[type[Section], str, Mapping[str, tuple[str, ...]]], ...] = (
    (AdvantageNode, "estimator", OF_ESTIMATORS),
    (LossSpec, "policy", OF_LOSSES),
    (TrackerSpec, "tracker", OF_TRACKERS),
    (
        LossDistillationSpec,
        "divergence",
        {
            "alpha": ("mixed_kl", "jsd"),
            **dict.fromkeys(("over", "outside", "min_logprob"), get_args(CandidateDivergence)),
        },
    ),
    (LossDistillationSpec, "over", dict.fromkeys(("outside", "min_logprob"), ("topk",))),
    (
        BufferNode,
        "policy",
        {
            **dict.fromkeys(("priority", "exponent", "floor"), ("prioritised",)),
            **dict.fromkeys(("right_above", "hard_below"), ("successes",)),
        },
    ),
    (DpoNode, "loss", {"label_smoothing": ("sigmoid",)}),
    (ProfileSpec, "tool", {"with_stack": ("torch",), "with_memory": ("torch",)}),
)
"""Section, key, and options -> the key's values that use them. ``args`` belong to the user's own functions."""
_ONLY_WITH: tuple[tuple[type[Section], str, tuple[str, ...]], ...] = (
    (KlInRewardSpec, "target_kl", ("horizon",)),
    (
        RolloutCorrectionSpec,
        "rollout_is",
        ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_batch_normalize"),
    ),
    (RolloutCorrectionSpec, "rollout_rs", ("rollout_rs_threshold", "rollout_rs_threshold_lower")),
    (RolloutNode, "partial_rollout", ("mask_offpolicy_in_partial_rollout", "partial_rollout_max_age")),
    (DataSpec, "responses", ("max_response_tokens", "overlong_responses")),
    (DataSpec, "image_key", ("min_pixels", "max_pixels")),
    (McpServerSpec, "command", ("env",)),
    (AgentSpec, "command", ("env",)),
    (FilterNode, "fn", ("args",)),
    (
        EndpointNode,
        "endpoint",
        ("model", "api_key_env", "extra_body", "concurrency", "retries", "timeout_s", "expected_s"),
    ),
    (JudgeNode, "engine", ("max_prompt_tokens", "chat_template_kwargs")),
    (LogprobNode, "engine", ("tokens_per_micro_batch",)),
)
"""Section, key, and options that need it."""
_NOT_WITH: tuple[tuple[type[Section], str, tuple[str, ...]], ...] = (
    (FilterNode, "fn", ("metric", "lower", "upper", "min_std", "by_source")),
    (CovarianceNode, "second_moment", ("share", "between", "top_entropy")),
    (CovarianceNode, "top_entropy", ("share", "between")),
    (LogprobNode, "candidates", ("top_k",)),
    (
        RolloutNode,
        "agent",
        (
            *("tools", "tool_args", "mcp_servers", "max_parallel_calls", "tool_timeout_s", "tool_concurrency"),
            *("max_turn_tokens", "max_observation_tokens"),
            *("environment", "environment_args", "on_environment_error"),
        ),
    ),
)
"""Section, key, and options that the key replaces."""


def check_unused_options(pipeline: Pipeline, findings: Findings) -> None:
    """Report options that have no effect beside the others of their section."""
    for place, section in _sections((), pipeline):
        given = [name for name in _fields_set(section) if _says_something(section, name)]
        for kind, key, values in _ONLY_WITH_VALUE:
            if isinstance(section, kind):
                known = [option for option in given if option in values or option == "args"]
                _check_values(place, key, getattr(section, key), known, values, findings)
        for kind, key, options in _ONLY_WITH:
            if isinstance(section, kind) and not getattr(section, key):
                for option in [option for option in options if option in given]:
                    findings.superfluous((*place, option), f"has no effect without `{key}`", "add that")
        for kind, key, options in _NOT_WITH:
            unused = [option for option in options if option in given]
            if unused and isinstance(section, kind) and getattr(section, key):
                findings.superfluous((*place, unused[0]), f"`{key}` takes the place of {listed(unused)}")


def _says_something(section: Section, option: str) -> bool:
    """Whether an option is set, to more than the default that switches it off."""
    value = getattr(section, option)
    default = type(section).model_fields[option].get_default(call_default_factory=True)
    return value is not None and bool(value or value != default)


def _check_values(
    place: Place, key: str, value: str, given: list[str], known: Mapping[str, tuple[str, ...]], findings: Findings
) -> None:
    own = ":" in value
    for option in given:
        if option == "args" and not own:
            findings.superfluous((*place, option), f"`{key}: {value}` takes no arguments")
        elif option != "args" and value not in known[option]:
            remedy = "move it to `args`" if own else ""
            findings.superfluous((*place, option), f"`{key}: {value}` has no such option", remedy)


def _fields_set(section: Section) -> list[str]:
    """The options that the file sets, in the order of the schema, so that problems have the same order in each run."""
    return [name for name in type(section).model_fields if name in section.model_fields_set]


def _sections(place: Place, value: object) -> Iterator[tuple[Place, Section]]:
    """Yield the sections of a pipeline that the file writes, with their places."""
    if isinstance(value, Section):
        yield place, value
        for name in _fields_set(value):
            yield from _sections((*place, name), getattr(value, name))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _sections((*place, name), inner)
    elif isinstance(value, tuple):
        for index, inner in enumerate(value):
            yield from _sections((*place, index), inner)
