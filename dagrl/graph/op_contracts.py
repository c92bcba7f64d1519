"""Contracts of the ops: columns in and out, and the capability that an engine needs. The ops are in `dagrl.ops`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from dagrl.config.capability import Capability
from dagrl.config.schema import (
    AdvantageNode,
    CovarianceNode,
    CriticNode,
    DpoNode,
    EngineSpec,
    JudgeNode,
    LogprobNode,
    MixNode,
    NodeBase,
    Pipeline,
    RewardModelNode,
    RewardNode,
    RolloutNode,
    SftNode,
    UpdateNode,
    ValuesNode,
)
from dagrl.graph.columns import SOURCE_COLUMNS
from dagrl.graph.offline import is_offline
from dagrl.graph.rollouts import rollouts


class Scope(Enum):
    """The part of a step's batch that an op processes at once."""

    ROW = "row"
    """Each row alone: starts on finished shards."""
    GROUP = "group"
    """All responses to a prompt: starts on finished shards too, for a shard holds whole groups."""
    BATCH = "batch"
    """The whole step."""


@dataclass(frozen=True, slots=True)
class OpContract:
    """Columns in and out of an op, by the op's own names."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scope: Scope = Scope.ROW
    reads_if_written: tuple[str, ...] = ()
    """Optional columns, read if a node writes them."""
    needs: Capability | None = None
    """The capability that its engine needs; None: runs on the host, without an engine."""
    whole_groups: bool = False
    """Whether an engine's rank that gets a row gets all of its group."""
    replaces: tuple[str, ...] = ()
    """Columns that it reads from one node and replaces for all others."""


@dataclass(frozen=True, slots=True)
class Formula:
    """Inputs of an advantage estimator or a policy loss."""

    reads: tuple[str, ...]
    """Columns, beside those that all of its kind read."""
    scope: Scope


_IN_GROUPS = Formula(("group_id",), Scope.GROUP)
_ESTIMATORS = {
    "reinforce_plus_plus": Formula((), Scope.BATCH),
    "reinforce_plus_plus_baseline": Formula(("group_id",), Scope.BATCH),
    "gae": Formula(("value",), Scope.BATCH),
    "remax": Formula(("baseline_reward",), Scope.ROW),
    "gpg": Formula(("group_id",), Scope.BATCH),
}
"""Estimators that do not just compare within groups."""
_WITH_OLD = Formula(("old_logprob",), Scope.BATCH)
_LOSSES = {
    **dict.fromkeys(("clip_cov", "kl_cov"), Formula(("old_logprob", "clip_cov_mask"), Scope.BATCH)),
    "opmd_pairwise": Formula(("old_logprob", "group_id"), Scope.BATCH),
}
"""Losses with other inputs than the old log-probs."""

ROLLOUT_WRITES = (
    "response_tokens",
    "response_mask",
    "rollout_logprob",
    "policy_version",
    "finish_reason",
    "routed_experts",
)
"""Columns of a rollout; the last one only if the engine reports it."""

OF_TURNS = ("token_turn", "token_reward")
"""Token columns of a rollout with several turns; the last one only with an environment, which gives the rewards."""

MIXED = ("response_tokens", "response_mask", "rollout_logprob", "finish_reason")
"""Columns of a rollout that ``mix`` replaces."""


def source_contract(pipeline: Pipeline) -> OpContract:
    """The implicit source of every pipeline: the step's prompts, each repeated for its n samples."""
    demonstration = ("demonstration",) if pipeline.data.responses else ()
    return OpContract(reads=(), writes=SOURCE_COLUMNS + demonstration, scope=Scope.BATCH)


def sink_contract(pipeline: Pipeline) -> OpContract:
    """The implicit sink: writes ``samples/step_N.parquet``."""
    sampled = ("response_tokens", "reward") if rollouts(pipeline) else ()
    given = ("demonstration",) if is_offline(pipeline) else ()
    return OpContract(
        reads=("group_id", "prompt_tokens", *sampled, "answer", "data_source", "data_set"),
        writes=(),
        scope=Scope.BATCH,
        reads_if_written=(
            *("advantage", "policy_version", "finish_reason", "is_expert", *OF_TURNS),
            *given,
        ),
    )


def contract_of(
    node: NodeBase, engines: Mapping[str, EngineSpec] = MappingProxyType({}), formula: Formula | None = None
) -> OpContract:
    """The contract of one of dagrl's own ops, its options and those of its engine taken into account.

    `formula`: what the user's own estimator or loss reads, where the node has one; see `dagrl.graph.plugins.formulas`.
    A `CustomNode` has its contract on the user's function: see `dagrl.graph.plugins.custom.contract_of_function`.
    """
    match node:
        case RolloutNode():
            return _of_rollout(node)
        case RewardNode():
            scored = ("prompt_tokens", "response_tokens", "answer", "data_source", "extra_info")
            if node.fn == "environment":
                return OpContract((*scored, "token_reward"), ("reward",), reads_if_written=("token_turn",))
            return OpContract(scored, ("reward",), reads_if_written=OF_TURNS)
        case LogprobNode():
            routes = _routes(engines.get(node.engine))
            return OpContract(("prompt_tokens", "response_tokens", *routes), ("logprob",), needs=Capability.SCORE)
        case AdvantageNode():
            return _of_advantage(node, formula)
        case UpdateNode():
            return _of_update(node, engines, formula)
        case ValuesNode():
            return OpContract(("prompt_tokens", "response_tokens"), ("value",), needs=Capability.SCORE)
        case CriticNode():
            trained_on = ("prompt_tokens", "response_tokens", "response_mask", "value", "return")
            return OpContract(trained_on, (), Scope.BATCH, needs=Capability.TRAIN)
        case RewardModelNode():
            engine = engines.get(node.engine)
            prompt = "messages" if engine is not None and engine.reads_messages else "prompt_tokens"
            return OpContract((prompt, "response_tokens"), ("reward",), needs=Capability.JUDGE)
        case JudgeNode():
            told = ("messages", "response_tokens", "answer", "data_source")
            needs = Capability.REPLY if node.engine else None
            return OpContract(told, ("reward",), reads_if_written=("token_turn",), needs=needs)
        case SftNode():
            return OpContract(("prompt_tokens", "demonstration"), (), Scope.BATCH, needs=Capability.TRAIN)
        case DpoNode():
            compared = ("group_id", "prompt_tokens", "demonstration", "ref_logprob")
            return OpContract(compared, (), Scope.BATCH, needs=Capability.TRAIN, whole_groups=True)
        case CovarianceNode():
            return OpContract(("old_logprob", "advantage", "response_mask"), ("clip_cov_mask",), Scope.BATCH)
        case MixNode():
            mixed = ("group_id", "demonstration", *MIXED)
            return OpContract(mixed, (*MIXED, "is_expert"), Scope.GROUP, replaces=MIXED)
    raise AssertionError(f"no contract for {node!r}")


def _of_rollout(node: RolloutNode) -> OpContract:
    reads: tuple[str, ...] = ("group_id", "prompt_tokens")
    writes = ROLLOUT_WRITES
    if node.multi_turn:
        reads += ("extra_info",)
        writes += ("turns", *(OF_TURNS if node.environment else OF_TURNS[:-1]))
    if node.environment:
        reads += ("answer", "data_source")
    return OpContract(reads, writes, needs=Capability.GENERATE)


def _of_advantage(node: AdvantageNode, formula: Formula | None) -> OpContract:
    critic = node.estimator == "gae"
    formula = formula or _ESTIMATORS.get(node.estimator, _IN_GROUPS)
    reads = ("reward", "response_mask", *formula.reads)
    scope = formula.scope
    if node.length_reward:
        reads += ("group_id",)
        scope = Scope.GROUP if scope is Scope.ROW else scope
    if node.kl_in_reward:
        reads += ("old_logprob", "ref_logprob")
    return OpContract(
        tuple(dict.fromkeys(reads)),
        ("advantage", "return") if critic else ("advantage",),
        scope,
        reads_if_written=("is_expert", *(("token_reward",) if critic else ())),
    )


def _of_update(node: UpdateNode, engines: Mapping[str, EngineSpec], formula: Formula | None) -> OpContract:
    reads: tuple[str, ...] = ("prompt_tokens", "response_tokens", "response_mask", "advantage", "policy_version")
    needed = {
        "ref_logprob": node.loss.kl_coef > 0,
        "rollout_logprob": node.rollout_correction is not None,
        "is_expert": node.loss.sft_coef > 0,
    }
    formula = formula or _LOSSES.get(node.loss.policy, _WITH_OLD)
    needed |= dict.fromkeys(formula.reads, True)
    if "old_logprob" in formula.reads:
        # Without the old log-probs, those of the weights that are trained stand in for them.
        needed["old_logprob"] = False
    optional = tuple(column for column, must in needed.items() if not must)
    reads += tuple(column for column, must in needed.items() if must) + _routes(engines.get(node.engine))
    return OpContract(
        tuple(dict.fromkeys(reads)),
        (),
        Scope.BATCH,
        optional,
        Capability.TRAIN,
        # A loss that knows groups compares their responses.
        whole_groups="group_id" in formula.reads,
    )


def _routes(engine: EngineSpec | None) -> tuple[str, ...]:
    """The column of routes, if the engine replays them."""
    return ("routed_experts",) if engine is not None and engine.replays_routes else ()
