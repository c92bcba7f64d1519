"""The policy, the prompts, and the slots that there are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationInfo, field_validator

from dagrl.config.schema.sampling import SamplingSpec
from dagrl.config.schema.section import Name, PositiveInt, Responses, Section, SlotsPerNode, Tokens


class TokenizerSpec(Section):
    """A small tokenizer made from the pipeline file, for models that start from random weights."""

    kind: Literal["characters", "bytes"]
    """``characters``: one token for each character of `alphabet`; ``bytes``: one for each byte of UTF-8."""
    alphabet: Annotated[str, Field(validate_default=True)] = ""
    """The characters that the model knows (``characters`` only)."""
    images: bool = False
    """Add a token that stands for a patch of an image, for models that see."""

    @field_validator("alphabet")
    @classmethod
    def _check_alphabet(cls, alphabet: str, info: ValidationInfo) -> str:
        doubled = [repr(character) for character, count in Counter(alphabet).items() if count > 1]
        if info.data.get("kind") == "bytes" and alphabet:
            raise ValueError("a tokenizer of bytes has no alphabet; remove it")
        if info.data.get("kind") == "characters" and not alphabet:
            raise ValueError("a tokenizer of characters needs an alphabet; write all its characters here")
        if doubled:
            raise ValueError(f"holds {', '.join(doubled)} more than once; write each character once")
        return alphabet


class ModelSpec(Section):
    """The policy that is trained: a Hugging Face folder, a published model, or random weights of a stated shape."""

    path: Path | None = None
    """A Hugging Face folder with config.json, safetensors and a tokenizer; or the name of a published model:
    ``Qwen/Qwen3-8B``, ``Qwen/Qwen3-8B@REVISION``, ``modelscope:Qwen/Qwen3-8B``."""
    hub: str | None = None
    """The published model whose folder in the cache `path` is. dagrl sets it, for a run that is resumed elsewhere."""
    init: dict[str, Any] | None = None
    """Random weights instead: the fields of a Hugging Face config, ``model_type`` among them."""
    tokenizer: Path | TokenizerSpec | None = None
    """A folder with a Hugging Face tokenizer, or one made on the spot. Default: the model's folder."""


class ValSetSpec(Section):
    """A validation set with its own number of responses and sampling. A plain path takes those of the rollout."""

    path: Path
    """Parquet file with the prompts."""
    n: Responses | None = None
    """Responses for each prompt. Default: ``val_n`` of the rollout."""
    sampling: SamplingSpec | None = None
    """Their sampling, by the rollout whose responses are scored. Default: its ``val_sampling``."""


class DataSpec(Section):
    """Prompts in verl's parquet schema: prompt, data_source, reward_model.ground_truth, extra_info."""

    train: Path
    """Parquet file with the training prompts."""
    val: Path | Annotated[dict[Name, Path | ValSetSpec], Field(min_length=1)] | None = None
    """Parquet file with the validation prompts, or several sets of them: name -> file, or section with a file."""
    prompts_per_step: PositiveInt
    """Prompts in one step; the batch has ``prompts_per_step * n`` samples."""
    prompts_per_node: PositiveInt | None = None
    """Instead of `prompts_per_step`: prompts in one step for each machine of the largest group that is trained."""
    max_prompt_tokens: Tokens
    """Longest prompt, in tokens, those of images included."""
    image_key: Annotated[str, Field(min_length=1)] | None = None
    """Column with the images of each prompt, a list of ``{bytes}`` or ``{path}``; ``<image>`` in the prompt marks their
    places. Default: prompts are text."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to so many pixels. Default: the model's own (preprocessor_config.json)."""
    max_pixels: PositiveInt | None = None
    """Larger images are reduced to so many pixels. Default: the model's own."""
    overlong_prompts: Literal["drop", "cut", "error"] = "drop"
    """Treatment of longer ones: left out, cut at their beginning, or an error. Dropped and cut are counted."""
    responses: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Columns with responses to the prompts, for ``sft``, ``dpo`` and ``mix``: text, a field of a struct such as
    ``extra_info.answer``, or a chat that ends with one. The rows of a prompt take them in turn."""
    max_response_tokens: Tokens | None = None
    """Longest of those responses, in tokens, the end token included."""
    overlong_responses: Literal["drop", "cut", "error"] = "drop"
    """Treatment of prompts with longer ones: left out, the response cut at its end, or an error."""
    shuffle: bool = True
    """A new order each epoch, drawn from ``run.seed``."""
    val_prompts: PositiveInt | None = None
    """Use only so many prompts of each validation set, drawn at random: the same ones in each validation and run."""
    val_pass_reward: FiniteFloat = 1.0
    """Reward from which on a validation response counts as right in ``pass@k``."""
    val_vote: str | None = None
    """How ``maj@k`` finds the answer in a response: ``math``, ``exact``, or your own as ``module:function``. Default:
    as the reward does, where that is ``math`` or ``exact``; without either there is no ``maj@k``."""

    @property
    def val_sets(self) -> dict[str, ValSetSpec]:
        """The validation sets by name, in the order of the file; one without a name is ``val``."""
        if self.val is None:
            return {}
        sets = self.val if isinstance(self.val, dict) else {"val": self.val}
        return {name: each if isinstance(each, ValSetSpec) else ValSetSpec(path=each) for name, each in sets.items()}

    @property
    def files(self) -> dict[str, Path]:
        """All prompt files by their keys: ``train``, ``val``, ``val.NAME``."""
        several, sets = isinstance(self.val, dict), self.val_sets.items()
        return {"train": self.train} | {f"val.{name}" if several else "val": each.path for name, each in sets}

    @property
    def val_prefixes(self) -> dict[str, str]:
        """Validation set -> prefix of its metrics after ``val/``; empty for a set without a name."""
        return {name: f"{name}/" if isinstance(self.val, dict) else "" for name in self.val_sets}

    @property
    def longest_demonstration(self) -> int:
        """Tokens of the longest prompt with a response of the data set."""
        return self.max_prompt_tokens + (self.max_response_tokens or 0)


class GroupSpec(Section):
    """A named set of GPUs, or of CPU slots where there is no GPU."""

    nodes: Annotated[int, Field(ge=1, le=2**14)] = 1
    """Machines in the group."""
    gpus_per_node: SlotsPerNode = 0
    """GPUs on each; one engine rank each."""
    cpus_per_node: SlotsPerNode = 0
    """Instead of GPUs: CPU slots on each; one engine rank each."""
    gpu: str | None = None
    """The model of the GPUs, such as ``H200``: `dagrl plan` counts with their memory and speed, and ``sleep: auto``
    lets engines of the group live together where the plan finds room for all."""

    @property
    def is_cpu(self) -> bool:
        """Whether the group's ranks run without a GPU."""
        return self.gpus_per_node == 0

    @property
    def ranks(self) -> int:
        """Engine ranks that the group holds."""
        return self.nodes * (self.gpus_per_node or self.cpus_per_node)
