"""What a pipeline file may say: frozen models, one per section, that refuse unknown keys.

``spec/reading`` turns YAML into a `Pipeline`; ``spec/checks`` holds the rules that join several sections or files;
``spec/ops.py`` says which columns each node reads and writes.
"""

from dagrl.spec.schema.covariance import CovarianceNode
from dagrl.spec.schema.critic import CriticNode, RewardModelNode, ValuesNode
from dagrl.spec.schema.engines import (
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
from dagrl.spec.schema.filter import FilterNode
from dagrl.spec.schema.judge import JudgeNode
from dagrl.spec.schema.model import DataSpec, GroupSpec, ModelSpec, TokenizerSpec
from dagrl.spec.schema.node_base import NodeBase, TrainingNode
from dagrl.spec.schema.nodes import (
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
from dagrl.spec.schema.objective import (
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
from dagrl.spec.schema.offline import DemonstrationNode, DpoNode, MixNode, SftNode
from dagrl.spec.schema.pipeline import Pipeline
from dagrl.spec.schema.run import KeepBestSpec, ProfileSpec, RunSpec, ScheduleSpec
from dagrl.spec.schema.sampling import SamplingSpec
from dagrl.spec.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section, Threshold
from dagrl.spec.schema.turns import TurnOptions

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
