"""A whole pipeline file, and properties derived from it alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dagrl.config.errors import Place
from dagrl.config.schema.backends import AnyEngineSpec
from dagrl.config.schema.data import DataSpec, TrainSourceSpec
from dagrl.config.schema.model import GroupSpec, ModelSpec
from dagrl.config.schema.nodes import NodeSpec
from dagrl.config.schema.nodes.base import PackingNode, TrainingNode
from dagrl.config.schema.nodes.demonstrations import DemonstrationNode
from dagrl.config.schema.nodes.logprob import LogprobNode
from dagrl.config.schema.nodes.rollout import RolloutNode
from dagrl.config.schema.nodes.tell import TellNode
from dagrl.config.schema.nodes.update import UpdateNode
from dagrl.config.schema.run import ProfileSpec, RunSpec, ScheduleSpec, TrackerName, TrackerSpec
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import Name, OwnFunction, Section


class Pipeline(Section):
    """A whole pipeline file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    """Names the run folder and the tracker's run."""
    model: ModelSpec
    """The policy."""
    data: DataSpec
    """The prompts."""
    groups: Annotated[dict[Name, GroupSpec], Field(min_length=1)]
    """GPUs or CPU slots, by name."""
    engines: Annotated[dict[Name, AnyEngineSpec], Field(min_length=1)]
    """Models with a layout on a group, by name."""
    nodes: Annotated[dict[Name, NodeSpec], Field(min_length=1)]
    """The stages of a step, by name."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How steps overlap."""
    run: RunSpec
    """How long, how often, how safely."""
    profile: ProfileSpec | None = None
    """Traces of some steps."""
    track: tuple[TrackerName | OwnFunction | TrackerSpec, ...] = ("console",)
    """Trackers of metrics and tables of samples, beside metrics.jsonl: names, your own as ``module:Class``, or sections
    with settings."""

    @property
    def trackers(self) -> tuple[TrackerSpec, ...]:
        """`track` as sections."""
        return tuple(TrackerSpec(tracker=each) if isinstance(each, str) else each for each in self.track)

    def moving_average_of(self, engine: str) -> float | None:
        """Rate of the moving average of an engine's weights; None without such a copy."""
        rates = (spec.moving_average for spec in self.engines.values() if spec.frozen_copy_of == engine)
        return next((rate for rate in rates if rate is not None), None)

    def hidden_teacher_of(self, engine: str) -> str | None:
        """The engine whose whole distributions an update of `engine` learns; validation allows one."""
        taught = any(
            isinstance(node, UpdateNode)
            and node.engine == engine
            and node.loss.distillation is not None
            and node.loss.distillation.over_vocabulary
            for node in self.nodes.values()
        )
        teachers = (node.engine for node in self.nodes.values() if isinstance(node, LogprobNode) and node.hidden_states)
        return next(teachers, None) if taught else None

    def model_section(self, engine: str) -> tuple[str, ...]:
        """Section of an engine's model: its own, that of the engine it has its weights from, or the pipeline's."""
        spec = self.engines[engine]
        home = spec.frozen_copy_of or spec.weights_from
        holders = [engine, *([home] if home in self.engines else [])]
        own = next((name for name in holders if self.engines[name].model is not None), None)
        return ("engines", own, "model") if own else ("model",)

    def model_of(self, engine: str) -> ModelSpec:
        """The model of an engine. Random weights without a tokenizer use the pipeline's."""
        section = self.model_section(engine)
        own = self.engines[section[1]].model if len(section) > 1 else None
        if own is None:
            return self.model
        if own.path is None and own.tokenizer is None:
            return own.model_copy(update={"tokenizer": self.model.tokenizer or self.model.path})
        return own

    @property
    def rollouts(self) -> dict[str, RolloutNode]:
        """The rollouts by name, in the order of the file."""
        return {name: node for name, node in self.nodes.items() if isinstance(node, RolloutNode)}

    @property
    def leading_rollout(self) -> str:
        """The rollout that sets the rows of a prompt, and whose responses `samples` stores; there must be one.

        It is the first with the largest ``n``: others sample as many for each prompt, or answer each row once.
        """
        rollouts = self.rollouts
        return max(rollouts, key=lambda name: rollouts[name].n)

    @property
    def is_offline(self) -> bool:
        """Whether nothing is trained on samples: there is no rollout, or only validation needs it."""
        trained = [node for node in self.nodes.values() if isinstance(node, TrainingNode)]
        from_data = [isinstance(node, DemonstrationNode) and node.learns_from_data for node in trained]
        return not self.rollouts or (bool(trained) and all(from_data))

    @property
    def reports_val_loss(self) -> bool:
        """Whether validations report the loss on the validation sets' responses."""
        nodes = self.nodes.values()
        return self.is_offline and any(isinstance(node, DemonstrationNode) and node.val_loss for node in nodes)

    def response_columns(self, *, validation: bool = False) -> tuple[str, ...]:
        """Columns of the training file, or of the validation files, that responses are read from."""
        return self.data.responses if not validation or self.reports_val_loss else ()

    def needs_answers(self, *, validation: bool = False) -> bool:
        """Whether the file must have reference answers: whether responses to its prompts are sampled and scored."""
        return bool(self.rollouts) and (validation or not self.is_offline)

    def samplings(self, rollout: str, *, validated: bool = True) -> dict[Place, SamplingSpec]:
        """The sampling options of a rollout by their places in the file.

        With `validated`, sampling options of validation are included if they differ.
        """
        node, place = self.rollouts[rollout], ("nodes", rollout)
        options: dict[Place, SamplingSpec] = {(*place, "sampling"): node.sampling}
        if validated and node.val_sampling is not None:
            options[*place, "val_sampling"] = node.val_sampling
        if rollout == self.leading_rollout:
            for key, spec in self.data.by_key.items():
                if spec.sampling is not None and (validated or key.startswith("train")):
                    options["data", *key.split("."), "sampling"] = spec.sampling
        return options

    def own_samplings(self, rollout: str, *, validation: bool = False) -> dict[str, SamplingSpec]:
        """Source, or validation set, with its own sampling by a rollout -> this sampling."""
        sets = self.data.val_sets if validation else self.data.sources
        own = {name: spec.sampling for name, spec in sets.items() if spec.sampling is not None}
        return own if rollout == self.leading_rollout else {}

    def val_sampling(self, rollout: str) -> SamplingSpec:
        """The sampling of a rollout in validation, of sets without their own. Greedy by default."""
        node = self.rollouts[rollout]
        return node.val_sampling or node.sampling.model_copy(update={"temperature": 0.0})

    @property
    def ns(self) -> dict[str, int]:
        """Source -> responses to each of its prompts."""
        usual = max((node.n for node in self.rollouts.values()), default=1)
        return {name: spec.n or usual for name, spec in self.data.sources.items()}

    @property
    def ns_by_place(self) -> dict[Place, int]:
        """Responses to a training prompt by their places in the file: of single sources, and of all others."""
        sources = {key: spec for key, spec in self.data.by_key.items() if isinstance(spec, TrainSourceSpec)}
        places: dict[Place, int] = {("data", *key.split("."), "n"): spec.n for key, spec in sources.items() if spec.n}
        if len(places) < len(sources):
            places["nodes", self.leading_rollout, "n"] = self.rollouts[self.leading_rollout].n
        return places

    @property
    def val_ns(self) -> dict[str, int]:
        """Validation set -> responses to each of its prompts."""
        usual = self.rollouts[self.leading_rollout].val_n
        return {name: spec.n or usual for name, spec in self.data.val_sets.items()}

    def group_sizes(self, *, validation: bool = False) -> dict[str, int]:
        """Source, or validation set -> rows of a group: the responses that are sampled for each of its prompts, or that
        the data set has for it.
        """
        if not self.rollouts or (self.is_offline and not validation):
            names = self.data.val_sets if validation else self.data.sources
            return dict.fromkeys(names, max(1, len(self.data.responses)))
        leading = self.rollouts[self.leading_rollout]
        return self.val_ns if validation else {name: n * leading.rows_per_sample for name, n in self.ns.items()}

    def rows_per_prompt(self, *, validation: bool = False) -> int:
        """Rows of the largest group."""
        given = 1 if self.rollouts else len(self.data.responses)
        return max(self.group_sizes(validation=validation).values(), default=max(1, given))

    def longest_rows(self, rollout: str, *, validated: bool) -> dict[Place, int]:
        """Tokens of the longest prompt and response of a rollout, by the places of `samplings`."""
        prompt = self.rollouts[rollout].max_prompt_tokens or self.data.max_prompt_tokens
        samplings = self.samplings(rollout, validated=validated)
        return {place: prompt + sampling.max_new_tokens for place, sampling in samplings.items()}

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row in training; 0 where nothing is sampled or given."""
        given = [self.data.longest_demonstration] if self.data.responses else []
        sampled = [row for name in self.rollouts for row in self.longest_rows(name, validated=False).values()]
        return max([*given, *sampled], default=0)

    @property
    def packing_nodes(self) -> dict[str, PackingNode]:
        """Nodes whose rows are packed by ``tokens_per_micro_batch``: not nodes of servers and endpoints."""
        nodes = ((name, node) for name, node in self.nodes.items() if isinstance(node, PackingNode))
        engines = ((name, node, self.engines.get(node.engine or "")) for name, node in nodes)
        return {name: node for name, node, engine in engines if engine and not engine.replicas_are_servers}

    def longest_scored(self, node: LogprobNode) -> int:
        """Tokens of the longest row that a node of log-probs reads: its prompts may be a teacher's."""
        nodes = self.nodes.values() if "prompt_tokens" in node.read else ()
        told = max((other.max_prompt_tokens for other in nodes if isinstance(other, TellNode)), default=0)
        return self.longest_row + max(0, told - self.data.max_prompt_tokens)

    def neighbours(self, engine: str) -> list[str]:
        """The other engines on the slots of this engine's group, each on its own ranks."""
        group = self.engines[engine].group
        return [other for other, spec in self.engines.items() if group and spec.group == group and other != engine]

    def sleeps(self, engine: str) -> bool:
        """Whether the engine sleeps. False for an engine on the ranks of another, which sleeps with that one."""
        spec = self.engines[engine]
        if spec.group is None or not self.neighbours(engine):
            return False
        # CPU slots share host memory, so moving an engine there gains nothing.
        return not self.groups[spec.group].is_cpu if spec.sleep == "auto" else spec.sleep

    def stays_beside_sleepers(self, engine: str) -> bool:
        """Whether the engine keeps its place on its devices while others of its group come and go."""
        return not self.sleeps(engine) and any(map(self.sleeps, self.neighbours(engine)))

    def wants_routed_experts(self, engine: str) -> bool:
        """Whether the engine samples responses whose routes another engine replays."""
        samples = any(node.engine == engine for node in self.rollouts.values())
        return samples and any(spec.replays_routes for spec in self.engines.values())
