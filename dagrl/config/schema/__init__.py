"""The schema of a pipeline file: frozen pydantic models, one for each section, that refuse unknown keys."""

from dagrl.config.schema.engine import EngineSpec, Sleep, WeightSyncSpec
from dagrl.config.schema.model import DataSpec, GroupSpec, ModelSpec, TokenizerSpec
from dagrl.config.schema.nodes import (
    AdvantageNode,
    CovarianceNode,
    CriticNode,
    CustomNode,
    DemonstrationNode,
    DpoNode,
    Estimator,
    FilterNode,
    JudgeNode,
    LogprobNode,
    MixNode,
    NodeBase,
    NodeSpec,
    PackingNode,
    RewardModelNode,
    RewardNode,
    RolloutNode,
    SamplingSpec,
    SftNode,
    TrainingNode,
    TurnOptions,
    UpdateNode,
    ValuesNode,
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
from dagrl.config.schema.pipeline import Pipeline
from dagrl.config.schema.run import KeepBestSpec, ProfileSpec, RunSpec, ScheduleSpec
from dagrl.config.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section, Threshold
