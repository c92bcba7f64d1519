"""Frozen models of the sections of a pipeline file, which refuse unknown keys.

`dagrl.config.loading` turns YAML into a `Pipeline`, `dagrl.validation` holds the rules that join several sections or
files, and `dagrl.graph.op_contracts` the columns that each node reads and writes.
"""

from dagrl.config.schema.covariance import CovarianceNode
from dagrl.config.schema.critic import CriticNode, RewardModelNode, ValuesNode
from dagrl.config.schema.engine import EngineSpec, Sleep, WeightSyncSpec
from dagrl.config.schema.filter import FilterNode
from dagrl.config.schema.judge import JudgeNode
from dagrl.config.schema.model import DataSpec, GroupSpec, ModelSpec, TokenizerSpec
from dagrl.config.schema.node_base import NodeBase, TrainingNode
from dagrl.config.schema.nodes import (
    AdvantageNode,
    CustomNode,
    Estimator,
    LogprobNode,
    NodeSpec,
    PackingNode,
    RewardNode,
    RolloutNode,
    UpdateNode,
)
from dagrl.config.schema.objective import (
    Aggregation,
    CosineRewardSpec,
    DivergenceCriterion,
    ImportanceLevel,
    KlInRewardSpec,
    LengthRewardSpec,
    LossSpec,
    OverlongBufferSpec,
    PolicyForm,
    RatioCriterion,
    RejectionCriterion,
    RolloutCorrectionSpec,
)
from dagrl.config.schema.offline import DemonstrationNode, DpoNode, MixNode, SftNode
from dagrl.config.schema.pipeline import Pipeline
from dagrl.config.schema.run import KeepBestSpec, ProfileSpec, RunSpec, ScheduleSpec
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section, Threshold
from dagrl.config.schema.turns import TurnOptions

__all__ = [
    "AdvantageNode",
    "Aggregation",
    "Coefficient",
    "CosineRewardSpec",
    "CovarianceNode",
    "CriticNode",
    "CustomNode",
    "DataSpec",
    "DemonstrationNode",
    "DivergenceCriterion",
    "DpoNode",
    "EngineSpec",
    "Estimator",
    "FilterNode",
    "GroupSpec",
    "ImportanceLevel",
    "JudgeNode",
    "KeepBestSpec",
    "KlInRewardSpec",
    "LengthRewardSpec",
    "LogprobNode",
    "LossSpec",
    "MixNode",
    "ModelSpec",
    "Name",
    "NodeBase",
    "NodeSpec",
    "OverlongBufferSpec",
    "OwnFunction",
    "PackingNode",
    "Pipeline",
    "PolicyForm",
    "PositiveInt",
    "ProfileSpec",
    "RatioCriterion",
    "RejectionCriterion",
    "RewardModelNode",
    "RewardNode",
    "RolloutCorrectionSpec",
    "RolloutNode",
    "RunSpec",
    "SamplingSpec",
    "ScheduleSpec",
    "Section",
    "SftNode",
    "Sleep",
    "Threshold",
    "TokenizerSpec",
    "TrainingNode",
    "TurnOptions",
    "UpdateNode",
    "ValuesNode",
    "WeightSyncSpec",
]
