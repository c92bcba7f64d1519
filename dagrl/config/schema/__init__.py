"""What a pipeline file may say: frozen models, one per section, that refuse unknown keys.

``spec/reading`` turns YAML into a `Pipeline`; ``spec/checks`` holds the rules that join several sections or files;
``spec/ops.py`` says which columns each node reads and writes.
"""

from dagrl.config.schema.covariance import CovarianceNode
from dagrl.config.schema.critic import CriticNode, RewardModelNode, ValuesNode
from dagrl.config.schema.engines import (
    EngineSpec,
    HfEngineSpec,
    LearningRateSpec,
    MegatronEngineSpec,
    OffloadSpec,
    ParallelSpec,
    SglangEngineSpec,
    Sleep,
    WeightSyncSpec,
)
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
    "HfEngineSpec",
    "ImportanceLevel",
    "JudgeNode",
    "KeepBestSpec",
    "KlInRewardSpec",
    "LearningRateSpec",
    "LengthRewardSpec",
    "LogprobNode",
    "LossSpec",
    "MegatronEngineSpec",
    "MixNode",
    "ModelSpec",
    "Name",
    "NodeBase",
    "NodeSpec",
    "OffloadSpec",
    "OverlongBufferSpec",
    "OwnFunction",
    "PackingNode",
    "ParallelSpec",
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
    "SglangEngineSpec",
    "Sleep",
    "Threshold",
    "TokenizerSpec",
    "TrainingNode",
    "TurnOptions",
    "UpdateNode",
    "ValuesNode",
    "WeightSyncSpec",
]
