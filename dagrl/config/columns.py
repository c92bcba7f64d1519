"""The columns that travel between nodes: their contents and layouts.

A batch is a table with one row for each sample. A ``SAMPLE`` column holds one value a row; ``PROMPT`` and ``RESPONSE``
columns are ragged, with one value for each prompt or response token of the row; ``TEXT`` holds a string a row, ``TOPK``
an array [response tokens, candidates] for each, ``HIDDEN`` one [response tokens, hidden size], ``ROUTES`` one [tokens
of prompt and response - 1, layers, experts per token], and ``IMAGES`` one for the images of a row, which rows of one
prompt share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

COLUMN_NAME = re.compile(r"[a-z][a-z0-9_]*")
"""Names of columns."""


class Shape(Enum):
    """How many values a row has."""

    SAMPLE = "per sample"
    PROMPT = "per prompt token"
    RESPONSE = "per response token"
    TOPK = "per response token and candidate"
    HIDDEN = "per response token and hidden value"
    ROUTES = "per token but the last, layer and expert"
    TEXT = "text"
    IMAGES = "per image, or pixel of one"

    @property
    def axes(self) -> int:
        """Axes of the array of a row; 0 if a row has a single value."""
        return {Shape.SAMPLE: 0, Shape.TOPK: 2, Shape.HIDDEN: 2, Shape.ROUTES: 3}.get(self, 1)


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The contract of one column."""

    name: str
    dtype: str
    """A numpy dtype's name; ``uint8`` for text, stored as UTF-8."""
    shape: Shape
    meaning: str


_CORE = (
    ColumnSpec("sample_id", "int64", Shape.SAMPLE, "row of the step's batch"),
    ColumnSpec("group_id", "int64", Shape.SAMPLE, "prompt of the step that the row answers"),
    ColumnSpec("prompt_tokens", "int64", Shape.PROMPT, "the prompt, chat template applied"),
    ColumnSpec("messages", "uint8", Shape.TEXT, "the prompt's chat messages, as JSON"),
    ColumnSpec("answer", "uint8", Shape.TEXT, "reference answer (reward_model.ground_truth)"),
    ColumnSpec("data_source", "uint8", Shape.TEXT, "name of the data set"),
    ColumnSpec("extra_info", "uint8", Shape.TEXT, "the row's extra_info, as JSON"),
    ColumnSpec("data_set", "uint8", Shape.TEXT, "name of the row's source or validation set"),
    ColumnSpec(
        "pixel_values", "uint8", Shape.IMAGES, "pixels of the prompt's images, one image after the other [n, 3]"
    ),
    ColumnSpec("image_sizes", "int32", Shape.IMAGES, "height and width of each of them, in pixels [images, 2]"),
    ColumnSpec("image_names", "uint8", Shape.TEXT, "path or hash of each of them, as JSON"),
    ColumnSpec("image_thumbnails", "uint8", Shape.TEXT, "a small JPEG of each of them as data URI, as JSON"),
    ColumnSpec("response_tokens", "int64", Shape.RESPONSE, "sampled tokens, the one that ended it included"),
    ColumnSpec(
        "demonstration", "int64", Shape.RESPONSE, "response of the data set (data.responses), end token included"
    ),
    ColumnSpec("is_expert", "float32", Shape.SAMPLE, "1 where the response is the data set's, and not sampled"),
    ColumnSpec("is_replayed", "float32", Shape.SAMPLE, "1 where a buffer has returned the sample from an earlier step"),
    ColumnSpec("response_pixel_values", "uint8", Shape.IMAGES, "pixels of images in answers to the policy [n, 3]"),
    ColumnSpec("response_image_sizes", "int32", Shape.IMAGES, "height and width of each of them [images, 2]"),
    ColumnSpec("response_image_starts", "int32", Shape.IMAGES, "index in the response of the first token of each"),
    ColumnSpec("response_mask", "float32", Shape.RESPONSE, "1 where a token is trained on"),
    ColumnSpec("rollout_logprob", "float32", Shape.RESPONSE, "log-prob under which the generator drew the token"),
    ColumnSpec("policy_version", "int64", Shape.SAMPLE, "version of the oldest weights that sampled the row"),
    ColumnSpec(
        "token_version",
        "int32",
        Shape.RESPONSE,
        "version of the weights that sampled the token, where they may differ; -1 in answers",
    ),
    ColumnSpec("finish_reason", "uint8", Shape.TEXT, "why the response ended: stop, length, turns or error"),
    ColumnSpec("turns", "int64", Shape.SAMPLE, "turns of the policy in the response, where it may have several"),
    ColumnSpec(
        "token_turn", "int16", Shape.RESPONSE, "turn in which the policy sampled the token, from 1; 0 in answers"
    ),
    ColumnSpec("token_reward", "float32", Shape.RESPONSE, "reward of a turn, at its last token; 0 elsewhere"),
    ColumnSpec("excluded", "float32", Shape.SAMPLE, "1 where an agent failed: no part of losses and baselines"),
    ColumnSpec("agent_reward", "float32", Shape.SAMPLE, "reward that an agent gave; NaN where it gave none"),
    ColumnSpec("agent_output", "uint8", Shape.TEXT, "end of what an agent's command printed"),
    ColumnSpec(
        "trajectory_share", "float32", Shape.SAMPLE, "part of its trajectory's trained tokens that the row holds"
    ),
    ColumnSpec("routed_experts", "int16", Shape.ROUTES, "experts that the generator sent each token to"),
    ColumnSpec("logprob", "float32", Shape.RESPONSE, "log-prob of the token under an engine's weights"),
    ColumnSpec("old_logprob", "float32", Shape.RESPONSE, "log-prob under the trainer's weights before the update"),
    ColumnSpec("ref_logprob", "float32", Shape.RESPONSE, "log-prob under the reference"),
    ColumnSpec(
        "teacher_logprob", "float32", Shape.RESPONSE, "log-prob under a teacher; NaN in rows that it has not read"
    ),
    ColumnSpec(
        "teacher_prompt_tokens", "int64", Shape.PROMPT, "the teacher's prompt: the row's prompt with added information"
    ),
    ColumnSpec("teacher_mask", "float32", Shape.SAMPLE, "1 where the row takes part in distillation"),
    ColumnSpec("topk_ids", "int32", Shape.TOPK, "likeliest tokens under an engine's weights; -1 where there are fewer"),
    ColumnSpec("topk_logprob", "float32", Shape.TOPK, "their log-probs"),
    ColumnSpec("teacher_topk_ids", "int32", Shape.TOPK, "tokens at which the teacher's distribution is known"),
    ColumnSpec("teacher_topk_logprob", "float32", Shape.TOPK, "their log-probs under the teacher"),
    ColumnSpec(
        "hidden_states", "int16", Shape.HIDDEN, "input of the output layer that predicts the token, as bits of bfloat16"
    ),
    ColumnSpec(
        "teacher_hidden_states", "int16", Shape.HIDDEN, "the same of a teacher; NaN in rows that it has not read"
    ),
    ColumnSpec("entropy", "float32", Shape.RESPONSE, "entropy in nats of the distribution at the token"),
    ColumnSpec(
        "prob_square_sum", "float32", Shape.RESPONSE, "sum over the vocabulary of the squared probabilities there"
    ),
    ColumnSpec("reward", "float32", Shape.SAMPLE, "score of the response"),
    ColumnSpec(
        "reward_info", "uint8", Shape.TEXT, "further numbers and texts that a reward function returned, as JSON"
    ),
    ColumnSpec("baseline_reward", "float32", Shape.SAMPLE, "score of the likeliest response to the prompt"),
    ColumnSpec("value", "float32", Shape.RESPONSE, "critic's estimate of the return"),
    ColumnSpec("advantage", "float32", Shape.RESPONSE, "how much better than expected"),
    ColumnSpec("clip_cov_mask", "float32", Shape.RESPONSE, "1 where an update holds the token back"),
    ColumnSpec("return", "float32", Shape.RESPONSE, "discounted sum of rewards to come"),
)

CORE_COLUMNS: dict[str, ColumnSpec] = {column.name: column for column in _CORE}

SOURCE_COLUMNS = (
    "sample_id",
    "group_id",
    "prompt_tokens",
    "messages",
    "answer",
    "data_source",
    "extra_info",
    "data_set",
)
"""Columns of the data set: written by the implicit node `prompts`."""
LOGPROB_COLUMNS = ("rollout_logprob", "old_logprob", "ref_logprob")
"""Log-probs of the sampled tokens under the generator, the trainer and the reference."""
HIDDEN_STATES = "teacher_hidden_states"
"""The column from which a student computes its teacher's whole distributions."""

IMAGE_COLUMNS = ("pixel_values", "image_sizes")
SHOWN_IMAGE_COLUMNS = ("image_names", "image_thumbnails")
"""Columns with the images of prompts, where ``data.image_key`` names some: engines read them with prompt_tokens."""
RESPONSE_IMAGE_COLUMNS = ("response_pixel_values", "response_image_sizes", "response_image_starts")
"""Columns with the images in answers of tools and environments, which engines read with response_tokens."""
