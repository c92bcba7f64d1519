"""Base classes of the nodes, and the contract of an op: columns in and out, scope, needed capability."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.section import Concurrency, Name, OwnFunction, PositiveInt, Seconds, Section

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

TURN_COLUMNS = ("token_turn", "token_reward")
"""Token columns of a rollout with several turns; the last one only with an environment, which gives the rewards."""


class Scope(Enum):
    """The part of a step's batch that an op processes at once."""

    ROW = "row"
    """Each row alone: starts on finished shards."""
    GROUP = "group"
    """All responses to a prompt: starts on finished shards too, because a shard holds whole groups."""
    BATCH = "batch"
    """The whole step."""


@dataclass(frozen=True, slots=True)
class OpContract:
    """Columns in and out of an op, by the op's names."""

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    scope: Scope = Scope.ROW
    reads_if_written: tuple[str, ...] = ()
    """Optional columns, read if a node writes them."""
    needs: Capability | None = None
    """The capability that its engine needs; None: runs on the host, without an engine."""
    whole_groups: bool = False
    """Whether an engine's rank that gets a row gets all of its group."""
    replaces: tuple[str, ...] = ()
    """Columns that it reads from one node and replaces for all others."""


class NodeBase(Section):
    """Options of every node."""

    op: str
    """The op that the node runs."""
    read: dict[str, str] = Field(default_factory=dict)
    """Column that the op reads -> its source: another column, or ``node.column``."""
    read_from: tuple[Name, ...] = ()
    """Nodes to read from where several write a column, instead of naming them column by column."""
    write: str | dict[str, str] | None = None
    """Name of the column that it writes, or a mapping (op's name -> name in this pipeline) if it writes several."""

    @property
    def user_function(self) -> tuple[tuple[str, ...], str] | None:
        """Key and ``module:function`` of the user's function that declares columns; None for built-in ones."""
        return None

    def written_as(self, column: str) -> str:
        """The name in the pipeline of `column`, the only column of an op."""
        return self.write.get(column, column) if isinstance(self.write, dict) else self.write or column

    def named(self, name: str, writes: tuple[str, ...]) -> dict[str, str]:
        """The pipeline's names of columns where `write` is only `name`; empty if that is not enough for `writes`."""
        return {writes[0]: name} if len(writes) == 1 else {}

    def contract(self, engine: EngineSpec | None = None, declared: OpContract | None = None) -> OpContract:
        """The op's columns, scope and needed capability. `declared`: the declaration of its `user_function`."""
        raise NotImplementedError(type(self).__name__)


class EndpointNode(NodeBase):
    """Options of every node that queries a model: the model of an engine, or one behind an endpoint."""

    engine: Name | None = None
    """The engine that answers."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/?#\s]")] | None = None
    """Instead of an engine: the address of a server with OpenAI's protocol, such as ``http://host:8000/v1``."""
    model: str | None = None
    """The model's name at the endpoint."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable that holds the key for the endpoint. The key itself is written nowhere. Default: no key."""
    concurrency: Concurrency = 32
    """Endpoints only: requests at once, for each worker."""
    retries: Annotated[int, Field(ge=0, le=1000)] = 5
    """Endpoints only: retries of a request without an answer, with growing pauses."""
    timeout_s: Seconds = 120.0
    """Endpoints only: timeout of an answer."""


class PackingNode(NodeBase):
    """Options of every node that runs a model on whole samples, packed into micro-batches."""

    engine: Name | None = None
    """The engine that computes."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Packed tokens in one pass of a model replica; in training, forward and backward."""


class SelectiveNode(NodeBase):
    """Options of every node that may compute some of the rows."""

    rows: dict[Name, Annotated[list[str | int | float], Field(min_length=1)]] | OwnFunction | None = None
    """The rows to compute: a mapping of a column to values, such as ``{data_set: [maths]}``, or your own function,
    ``module:function``, which takes columns by name and returns a bool for each row. Other rows become NaN: a node
    ``{op: merge}`` takes them from another column. Default: all."""

    @property
    def user_function(self) -> tuple[tuple[str, ...], str] | None:
        return (("rows",), self.rows) if isinstance(self.rows, str) else None

    def chosen_by(self, declared: OpContract | None) -> tuple[str, ...]:
        """The columns that choose the rows; `declared`: those of the user's function."""
        return declared.reads if declared else tuple(self.rows or ()) if not isinstance(self.rows, str) else ()


class TrainingNode(PackingNode):
    """Options of every node that trains an engine, in optimizer steps of one mini-batch each."""

    engine: Name
    """The engine that is trained."""
    mini_batch: PositiveInt | None = None
    """Prompts in one optimizer step. Default: all prompts of the step."""
    mini_batch_per_node: PositiveInt | None = None
    """Instead of `mini_batch`: prompts in one optimizer step for each machine, as with ``data.prompts_per_node``."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over the step's samples."""

    @property
    def loss_is_sum_over_tokens(self) -> bool:
        """Whether a token's loss depends on no other token's log-prob, so that logits need not be computed again."""
        return False

    def optimizer_steps(self, prompts_per_step: int) -> int:
        """Optimizer steps on one step's batch."""
        return -(-prompts_per_step // (self.mini_batch or prompts_per_step)) * self.epochs


def routes_read(engine: EngineSpec | None) -> tuple[str, ...]:
    """The column of routes, if the engine replays them."""
    return ("routed_experts",) if engine is not None and engine.replays_routes else ()
