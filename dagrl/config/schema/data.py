"""The data section: sources of prompts for training and validation, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, FiniteFloat, Tag, field_validator, model_validator

from dagrl.config.schema.order import OrderName, OrderSpec
from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import Name, PositiveInt, Responses, Section, Tokens, Weight

Column = Annotated[str, Field(min_length=1)]
"""A column, or a field of a struct: ``extra_info.answer``."""


class SourceSpec(Section):
    """The source of prompts, and its columns."""

    usual_split: ClassVar[str] = "train"

    path: Path | Annotated[tuple[Path, ...], Field(min_length=1)] | None = None
    """A file (parquet, JSON or JSON Lines, also with gzip, or Arrow), a folder of them or of `datasets`, or a glob; or
    a list of these."""
    hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")] | None = None
    """Instead of `path`: a data set of the Hugging Face Hub, ``ORG/NAME`` or ``ORG/NAME@REVISION``."""
    name: str | None = None
    """Configuration of a data set of the Hub that has several, such as ``main``."""
    split: str | None = None
    """Split of a data set of the Hub, or of a folder of `datasets` with several. Default: ``train``, and ``test`` in
    ``val``."""
    streamed: bool = False
    """Read a data set of the Hub over the network, a row group at a time, instead of downloading it."""
    prompt_key: Column = "prompt"
    """Column with the prompts: text, or a chat, also as ``{from, value}``. The last answers of a chat are removed."""
    answer_key: Column = "reward_model.ground_truth"
    """Column with the reference answers; if the column holds chats, the last message."""
    system_prompt: str | None = None
    """System message in front of each prompt that has none."""

    @model_validator(mode="after")
    def _check_origin(self) -> SourceSpec:
        if (self.path is None) == (self.hub is None):
            raise ValueError("has both `path` and `hub`; keep one" if self.path else "needs `path` or `hub`; add one")
        if self.hub is None and (key := next((key for key in ("name", "streamed") if getattr(self, key)), None)):
            raise ValueError(f"`{key}` is for data sets of the Hub; remove it, or replace `path` by `hub`")
        return self

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, folders and globs; empty for a data set of the Hub."""
        return self.path if isinstance(self.path, tuple) else (self.path,) if self.path is not None else ()

    @property
    def title(self) -> str:
        """A short description of the source for messages."""
        if self.hub is not None:
            return ", ".join(filter(None, (self.hub, self.name)))
        first, *others = self.paths
        return f"{first} and {len(others)} more" if others else str(first)


class TrainSourceSpec(SourceSpec):
    """A source of training prompts: ``data.train`` itself, or each name in it."""

    weight: Weight = 1.0
    """Share of its prompts in a step, relative to those of other sources."""
    n: Responses | None = None
    """Responses for each of its prompts. Default: ``n`` of the rollout."""
    sampling: SamplingSpec | None = None
    """Sampling for its prompts in the rollout whose responses are scored. Default: the rollout's ``sampling``."""
    max_prompt_tokens: Tokens | None = None
    """Longest prompt of the source, in tokens, if shorter than ``data.max_prompt_tokens``."""


class ValSetSpec(SourceSpec):
    """A validation set, ``data.val`` itself or each name in it. A plain path is sampled as in the rollout."""

    usual_split: ClassVar[str] = "test"

    n: Responses | None = None
    """Responses for each prompt. Default: ``val_n`` of the rollout."""
    sampling: SamplingSpec | None = None
    """Sampling for its prompts in the rollout whose responses are scored. Default: the rollout's ``val_sampling``."""


def is_one_source(value: Mapping[str, object]) -> bool:
    """Whether a mapping under ``train`` or ``val`` is a source, not names of sources."""
    keys = {*TrainSourceSpec.model_fields, *ValSetSpec.model_fields}
    return any(
        key in keys and (not isinstance(each, Mapping) or (key == "sampling" and not keys & each.keys()))
        for key, each in value.items()
    )


def _form(value: object) -> str:
    """The kind of a value of ``train``, ``val``, or of a name in it: a tag of the unions below."""
    if isinstance(value, Section):
        return "a section"
    if isinstance(value, Mapping):
        return "a section" if is_one_source(value) else "names"
    return "a list" if isinstance(value, list | tuple) else "a path"


def _form_of_name(value: object) -> str:
    form = _form(value)
    return "a section" if form == "names" else form


_APath = Annotated[Path, Tag("a path")]
_AList = Annotated[tuple[Path, ...], Field(min_length=1), Tag("a list")]
_TrainSource = Annotated[
    _APath | _AList | Annotated[TrainSourceSpec, Tag("a section")],
    Discriminator(_form_of_name),
]
_ValSet = Annotated[_APath | _AList | Annotated[ValSetSpec, Tag("a section")], Discriminator(_form_of_name)]


class DataSpec(Section):
    """Prompts in verl's schema (prompt, data_source, reward_model.ground_truth, extra_info), or in other columns.

    A source is a file, a folder, a glob, a list of these, or a section with more keys.
    """

    refused: ClassVar[dict[str, str]] = {
        "shuffle": "`shuffle` is now `order`: write `order: shuffled` (the default) for true, `order: file` for false"
    }

    train: Annotated[
        _APath
        | _AList
        | Annotated[TrainSourceSpec, Tag("a section")]
        | Annotated[dict[Name, _TrainSource], Field(min_length=1), Tag("names")],
        Discriminator(_form),
    ]
    """Training prompts: a source, or several of them: name -> source."""
    val: (
        Annotated[
            _APath
            | _AList
            | Annotated[ValSetSpec, Tag("a section")]
            | Annotated[dict[Name, _ValSet], Field(min_length=1), Tag("names")],
            Discriminator(_form),
        ]
        | None
    ) = None
    """Validation prompts: a source, or several sets: name -> source."""
    prompts_per_step: PositiveInt
    """Prompts in one step; the batch has ``prompts_per_step * n`` samples."""
    prompts_per_node: PositiveInt | None = None
    """Instead of `prompts_per_step`: prompts in one step for each machine of the largest group that is trained."""
    max_prompt_tokens: Tokens
    """Longest prompt, in tokens, including those of images."""
    image_key: Column | None = None
    """Column with the images of each prompt, a list of ``{bytes}`` or ``{path}``; ``<image>`` in the prompt marks their
    places. Default: prompts are text."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to this many pixels. Default: the model's own (preprocessor_config.json)."""
    max_pixels: PositiveInt | None = None
    """Larger images are reduced to this many pixels. Default: the model's own."""
    overlong_prompts: Literal["drop", "cut", "error"] = "drop"
    """Treatment of longer prompts: dropped, cut at their beginning, or an error. Dropped and cut prompts are
    counted."""
    responses: tuple[Column, ...] = ()
    """Columns with responses to the prompts, for ``sft``, ``dpo`` and ``mix``: text, a field of a struct such as
    ``extra_info.answer``, or a chat that ends with one. The rows of a prompt take them in turn."""
    max_response_tokens: Tokens | None = None
    """Longest response of the data set, in tokens, including the end token."""
    overlong_responses: Literal["drop", "cut", "error"] = "drop"
    """Treatment of prompts with longer responses: dropped, the response cut at its end, or an error."""
    order: Annotated[
        Annotated[OrderName, Tag("a name")] | Annotated[OrderSpec, Tag("a section")],
        Discriminator(lambda value: "a section" if isinstance(value, Mapping | OrderSpec) else "a name"),
    ] = "shuffled"
    """Order of the training prompts: ``shuffled``, anew each epoch, by ``run.seed``; ``file``; your own sampler as
    ``module:Class``; or a section: by a column, adaptive, in stages. See docs/curriculum.md."""
    weights_by: Literal["prompts", "tokens"] = "prompts"
    """Whether the weights of several sources are shares of prompts, or of their tokens with the responses."""
    val_prompts: PositiveInt | None = None
    """Use only this many prompts of each validation set, drawn at random: the same ones in each validation and run."""
    val_pass_reward: FiniteFloat = 1.0
    """Lowest reward with which a validation response counts as right in ``pass@k``."""
    val_vote: str | None = None
    """How ``maj@k`` finds the answer in a response: ``math``, ``exact``, or your own as ``module:function``. Default:
    as the reward does, if that is ``math`` or ``exact``; otherwise ``maj@k`` is not reported."""

    @field_validator("train")
    @classmethod
    def _check_weights(cls, train: object) -> object:
        sources = list(train.values()) if isinstance(train, dict) else [train]
        if all(isinstance(source, TrainSourceSpec) and not source.weight for source in sources):
            raise ValueError("each source has the weight 0; give one of them a weight above 0")
        return train

    @property
    def sources(self) -> dict[str, TrainSourceSpec]:
        """The training sources by name, in the order of the file. A source without a name is ``train``."""
        several = self.train if isinstance(self.train, dict) else {"train": self.train}
        return {
            name: each if isinstance(each, TrainSourceSpec) else TrainSourceSpec(path=each)
            for name, each in several.items()
        }

    @property
    def ordering(self) -> OrderSpec:
        """The options of `order`; none for ``shuffled`` and ``file``."""
        if isinstance(self.order, OrderSpec):
            return self.order
        return OrderSpec(sampler=self.order if ":" in self.order else None)

    @property
    def order_learns(self) -> bool:
        """Whether the order of later steps depends on the outcomes of earlier ones."""
        order = self.ordering
        by_tokens = self.weights_by == "tokens" and len(self.sources) > 1
        return order.sampler is not None or order.adaptive is not None or by_tokens

    @property
    def val_sets(self) -> dict[str, ValSetSpec]:
        """The validation sets by name, in the order of the file. A set without a name is ``val``."""
        if self.val is None:
            return {}
        sets = self.val if isinstance(self.val, dict) else {"val": self.val}
        return {name: each if isinstance(each, ValSetSpec) else ValSetSpec(path=each) for name, each in sets.items()}

    @property
    def by_key(self) -> dict[str, TrainSourceSpec | ValSetSpec]:
        """All sources by their keys: ``train`` or ``train.NAME``, ``val`` or ``val.NAME``."""
        found: dict[str, TrainSourceSpec | ValSetSpec] = {}
        for key, written, several in (("train", self.train, self.sources), ("val", self.val, self.val_sets)):
            found |= {f"{key}.{name}" if isinstance(written, dict) else key: each for name, each in several.items()}
        return found

    @property
    def val_prefixes(self) -> dict[str, str]:
        """Validation set -> prefix of its metrics after ``val/``; empty for a set without a name."""
        return {name: f"{name}/" if isinstance(self.val, dict) else "" for name in self.val_sets}

    @property
    def train_prefixes(self) -> dict[str, str]:
        """Source -> prefix of its metrics; empty for a single source."""
        return {name: f"train/{name}/" for name in self.sources} if len(self.sources) > 1 else {}

    @property
    def longest_demonstration(self) -> int:
        """Tokens of the longest prompt together with its response from the data set."""
        return self.max_prompt_tokens + (self.max_response_tokens or 0)
