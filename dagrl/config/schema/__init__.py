"""The schema of a pipeline file: frozen pydantic models, one for each section, that refuse unknown keys."""

from dagrl.config.schema.data import DataSpec, SourceSpec, TrainSourceSpec, ValSetSpec
from dagrl.config.schema.engine import EngineSpec, Sleep, WeightSyncSpec
from dagrl.config.schema.model import GroupSpec, ModelSpec, TokenizerSpec
from dagrl.config.schema.nodes import CustomNode, NodeSpec
from dagrl.config.schema.nodes.advantage import (
    AdvantageNode,
    CosineRewardSpec,
    Estimator,
    KlInRewardSpec,
    LengthRewardSpec,
    OverlongBufferSpec,
)
from dagrl.config.schema.nodes.base import (
    TURN_COLUMNS,
    Aggregation,
    NodeBase,
    OpContract,
    PackingNode,
    Scope,
    SelectiveNode,
    TrainingNode,
)
from dagrl.config.schema.nodes.buffer import BufferNode
from dagrl.config.schema.nodes.covariance import CovarianceNode
from dagrl.config.schema.nodes.critic import CriticNode, ValuesNode
from dagrl.config.schema.nodes.demonstrations import DemonstrationNode, DpoNode, SftNode
from dagrl.config.schema.nodes.distillation import AdvantageDistillationSpec, LossDistillationSpec
from dagrl.config.schema.nodes.filter import FilterNode
from dagrl.config.schema.nodes.judge import JudgeNode
from dagrl.config.schema.nodes.logprob import LogprobNode
from dagrl.config.schema.nodes.merge import MergeNode
from dagrl.config.schema.nodes.mix import MixNode
from dagrl.config.schema.nodes.reward import RewardModelNode, RewardNode, SourceReward
from dagrl.config.schema.nodes.rollout import (
    AGENT_COLUMNS,
    ROLLOUT_WRITES,
    AgentSpec,
    McpServerSpec,
    RolloutNode,
    TurnOptions,
)
from dagrl.config.schema.nodes.tell import TellNode
from dagrl.config.schema.nodes.update import (
    DivergenceCriterion,
    ImportanceLevel,
    LossSpec,
    PolicyForm,
    RatioCriterion,
    RejectionCriterion,
    RolloutCorrectionSpec,
    UpdateNode,
)
from dagrl.config.schema.pipeline import Pipeline
from dagrl.config.schema.run import KeepBestSpec, ProfileSpec, RecordSpec, RunSpec, ScheduleSpec, TrackerSpec
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.sandbox import SandboxSpec
from dagrl.config.schema.section import Coefficient, Name, OwnFunction, PositiveInt, Section, Threshold
