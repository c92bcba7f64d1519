"""Length, checkpoints, schedule and profiles of a run."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dagrl.config.schema.alarms import STOPS, WARNINGS, Condition, ConditionText, with_defaults
from dagrl.config.schema.section import Concurrency, Name, OwnFunction, PositiveInt, Seconds, Section

UNKNOWN_STEPS = 2**31 - 1
"""``run.steps`` where it follows from ``run.epochs`` and the training file is not here."""
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(duration: str) -> float:
    """Seconds of a duration such as ``4h``, ``3h30m`` or ``1d12h``. ValueError for other texts, and for none."""
    if re.fullmatch(r"(\d+(\.\d+)?[dhms])+", duration, re.ASCII):
        parts = re.findall(r"([\d.]+)([dhms])", duration)
        if 0 < (seconds := sum(float(number) * _UNITS[unit] for number, unit in parts)) < math.inf:
            return seconds
    raise ValueError(f"{duration!r} is no duration; write 4h, 3h30m or 1d12h")


def _is_duration(text: str) -> str:
    seconds_of(text)
    return text


class ScheduleSpec(Section):
    """How steps overlap."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    """Policy versions by which a sample may lag behind the weights that it trains. 0 is on-policy; with n, n steps are
    generated ahead while others are trained on."""
    stale_samples: Literal["auto", "mask", "drop", "stop"] = "auto"
    """Treatment of samples that are further behind: ``mask`` trains on none of their tokens, ``drop``
    leaves them out of the batch, ``stop`` ends the run. ``auto``: mask; partial rollouts may be older, by
    ``partial_rollout_max_age``."""
    in_flight_weight_update: bool = False
    """Update generators during a rollout; ``weight_sync.pause`` sets the treatment of unfinished responses. Default:
    between two rollouts."""
    stream_update: bool = False
    """Start each mini-batch of the update as soon as its shards are ready, before the step's last response."""
    weights_every: Annotated[int, Field(ge=0)] = 1
    """With ``dagrl run --only``: steps between the weights that the trainer writes for explorers; 0, none, for
    experience that exists already. See docs/explore_train.md."""
    shards_per_step: PositiveInt = 4
    """Pieces of a step's batch, whole groups each: row-wise nodes start on finished ones."""


class KeepBestSpec(Section):
    """Choice of the best checkpoint."""

    metric: str = "val/reward/mean"
    """A metric of the steps that are saved, by its name in metrics.jsonl."""
    mode: Literal["max", "min"] = "max"
    """Whether more is better, or less."""


class RecordSpec(Section):
    """Records of nodes, for `dagrl replay` and `dagrl diff`: their inputs and outputs, in ``records/``."""

    nodes: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Nodes that are recorded. The updates that lead to their weights are recorded too."""
    keep_last: PositiveInt | None = None
    """Keep this many steps, up to twice as many, and the state that they start from, which takes a checkpoint of each
    trained engine every `keep_last` steps. Default: keep all steps; a replay starts from a checkpoint of the run."""
    keep_on: tuple[Literal["nonfinite", "alarm"], ...] = ("nonfinite", "alarm")
    """If not all steps are kept: events whose steps, and the steps before them, are kept permanently. ``nonfinite``: a
    metric is NaN or infinite. ``alarm``: a condition of ``run.warn_when`` or ``run.stop_when`` is met. The steps before
    a failure are the last."""


class RunSpec(Section):
    """Length, checkpoints, validation and failures of a run."""

    steps: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """Steps to train; 0 with `validate_first`, or with `val_only`, only validates."""
    epochs: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Instead of `steps`: passes over the training prompts; a pass has as many prompts as all sources have rows. The
    last step reads the last prompt, and is filled up with prompts of the next pass."""
    stop_after: Annotated[str, AfterValidator(_is_duration)] | None = None
    """Stop at the end of the first step that ends this long after the start of `dagrl run`, with a checkpoint and exit
    code 4: ``4h``, ``3h30m``, ``1d12h``. Leave room for a step and the checkpoint. Default: go on to the last step."""
    warn_when: tuple[ConditionText, ...] = WARNINGS
    """Conditions on the metrics of a step, each with a line on the console when it begins. The defaults hold for
    metrics that you do not name; ``[]`` is none at all. See docs/alarms.md."""
    stop_when: tuple[ConditionText, ...] = STOPS
    """Conditions that end the run, with a checkpoint and exit code 5; otherwise like `warn_when`."""
    alarm_command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A program and its arguments, called when a condition is met, with the alarm as JSON on its standard input."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Source of all randomness."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints. The last step is always saved."""
    keep: PositiveInt | Literal["all"] = 3
    """Number of the newest checkpoints to keep, or ``all``."""
    keep_best: KeepBestSpec | None = None
    """Also keep the best checkpoint."""
    async_save: bool = False
    """Write checkpoints while training goes on; a step's checkpoint counts once it is whole."""
    validate_every: PositiveInt | None = None
    """Steps between validations."""
    validate_first: bool = False
    """Validate before the first step too."""
    val_only: bool | Literal["best"] | PositiveInt = False
    """Validate once and train nothing: ``true``, the newest checkpoint of the run folder, or the start weights without
    one; ``best``, or the number of a step: that checkpoint. See docs/validation.md."""
    resume: Literal["auto", "never"] = "auto"
    """``auto`` goes on from the run folder's newest checkpoint; ``never`` refuses a folder that holds one."""
    host_workers: Concurrency = 1
    """Processes for the nodes without an engine: prompts, rewards, advantages. They are spread over the machines. More
    processes than CPU cores help only if rewards wait for other machines."""
    samples_per_step: Annotated[int, Field(ge=0)] = 64
    """Samples of each source in a step, and of each validation set, written to ``samples/step_N.parquet``."""
    sample_logprobs: bool = False
    """Also write each token's text, and its log-probs under the generator and, where a node computes them, under the
    trainer (``old_logprob``) and the reference: `dagrl report --html` colours their differences."""
    log_val_generations: Annotated[int, Field(ge=0)] = 16
    """Samples of each validation in the trackers' tables: a part of ``samples/``, spread over all sets."""
    record: Annotated[tuple[Name, ...], Field(min_length=1)] | RecordSpec | None = None
    """Nodes whose inputs and outputs are kept, so that `dagrl replay` can run them again; see docs/replay.md."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for workers and engines to start."""
    node_timeout_s: Seconds = 1800.0
    """Longest wait for a sign of life from a running node, a weight sync, a save or a sampler of yours."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts after lost workers: workers of a generator start again, any others return the run to its last
    checkpoint. After that, a lost worker ends the run. See docs/failures.md."""

    @property
    def known_steps(self) -> int | None:
        """`steps`; None if it follows from `epochs` and a file that is not here."""
        return None if self.steps == UNKNOWN_STEPS else self.steps

    @property
    def stop_after_s(self) -> float | None:
        """`stop_after` in seconds."""
        return None if self.stop_after is None else seconds_of(self.stop_after)

    @property
    def warnings(self) -> tuple[Condition, ...]:
        """The conditions of `warn_when`."""
        return with_defaults(self.warn_when, WARNINGS)

    @property
    def stops(self) -> tuple[Condition, ...]:
        """The conditions of `stop_when`."""
        return with_defaults(self.stop_when, STOPS)

    def end_position(self, rows: int) -> int | None:
        """Prompts of `epochs` passes over a file with this number of rows."""
        # Rounded: 0.1 of 30 is a little more than 3 in floats, and no prompt more.
        return None if self.epochs is None else math.ceil(round(self.epochs * rows, 6))

    @property
    def only_validates(self) -> bool:
        """Whether nothing is trained."""
        return self.val_only is not False or self.steps == 0

    @property
    def validates(self) -> bool:
        """Whether there are validations."""
        return self.validate_first or self.validate_every is not None or self.val_only is not False

    @property
    def recorded(self) -> RecordSpec | None:
        """The nodes that are recorded, with defaults in place of a plain list."""
        return RecordSpec(nodes=self.record) if isinstance(self.record, tuple) else self.record


class ProfileSpec(Section):
    """Profiles of some steps."""

    tool: Literal["torch", "nsys"] = "torch"
    """``torch``: a Chrome trace of each rank in ``profile/``. ``nsys``: NVTX ranges, captured by ``nsys profile``."""
    steps: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Steps that are profiled."""
    nodes: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """Nodes that are profiled. Default: all that run on an engine."""
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    """Ranks of each engine that are profiled."""
    with_stack: bool = False
    """Torch only: record the source lines."""
    with_memory: bool = False
    """Torch only: record allocations."""


TrackerName = Literal["console", "tensorboard", "wandb", "mlflow", "swanlab"]


class TrackerSpec(Section):
    """A tracker with settings; its name alone stands for one without."""

    tracker: TrackerName | OwnFunction
    """Its name, or your own class, ``module:Class``."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project of wandb and SwanLab, experiment of MLflow. Default: that of the library's environment variable, or
    ``dagrl``."""
    entity: Annotated[str, Field(min_length=1)] | None = None
    """Team or user of wandb, workspace of SwanLab. Default: the library's own."""
    group: Annotated[str, Field(min_length=1)] | None = None
    """Group of runs in the project, of wandb and SwanLab."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the run, of wandb, SwanLab and MLflow. Default: the pipeline's."""
    args: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of your own class."""
