"""A reward model in the worker process: a Hugging Face sequence classifier with one label.

Implements `dagrl.backends.base.ScoreEngine`. Conversations are rendered with the model's tokenizer and chat template.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jinja2 import TemplateError

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Conversation, ModelScores, SleepReport
from dagrl.backends.hf.model import avoid_misaligned_grouped_mm, device_and_dtype, unset_model
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.hf.sleep import SleepingWeights
from dagrl.backends.hf.weights import replace_weights
from dagrl.backends.runtime.device_memory import device_gib_used
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config, model_imports
from dagrl.model_files.stored_weights import check_finite
from dagrl.model_files.tensor_names import SCORE
from dagrl.model_files.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LM_HEAD = "lm_head.weight"
_NO_TOKEN = -1


class HfClassifier:
    """One replica: float32 on a CPU, bfloat16 on a GPU with a float32 score. Its weights never change."""

    def __init__(self, model: ModelSpec, spec: HfEngineSpec, ranks: RankContext) -> None:
        """Build the model. Raises ValueError if its folder is not a reward model's, or has no chat template."""
        used_by_others = device_gib_used()
        self._max_batch_size = spec.max_batch_size
        self._tokenizer = load_tokenizer(model)
        if not self._tokenizer.chat_template:
            name = model.path or "the model of random weights"
            message = f"the tokenizer of {name} has no chat template, which a reward model needs"
            raise ValueError(f"{message}; put the one it was trained with into its folder, as chat_template.jinja")
        config = _config(model)
        self._model = _read(model, config) if model.path is not None else _draw(model, config, ranks.seed)
        # Decoders are read at their last token. Rows are padded on the left, so that this is the last position of all
        # rows, and an end token equal to the padding token is not skipped.
        self._fills_left = hasattr(self._model, "score")
        if self._fills_left:
            self._model.config.get_text_config().pad_token_id = _NO_TOKEN
            _score_in_float32(self._model)
        places = getattr(config, "max_position_embeddings", None) or sys.maxsize
        # Some encoders have unused positions, which only their tokenizers know.
        self._longest = places if self._fills_left else min(places, self._tokenizer.model_max_length)
        # Scoring needs no KV cache.
        self._model.config.get_text_config().use_cache = False
        self._takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self._weights = SleepingWeights(lambda: self._model.parameters(), keep=True, gib_used_by_others=used_by_others)
        self.policy_version = 0

    def scores(self, conversations: Sequence[Conversation], *, tokens_per_micro_batch: int) -> ModelScores:
        """See `ScoreEngine.scores`. Batches have rows of similar length within the token budget, at least one row."""
        self._weights.refuse_asleep()
        rows = self._tokens(conversations)
        cut = np.array([len(row) > self._longest for row in rows], dtype=bool)
        rows = [self._end_of(row) for row in rows]
        values = np.zeros(len(rows), dtype=np.float32)
        for batch in _batches([len(row) for row in rows], self._max_batch_size, tokens_per_micro_batch):
            values[batch] = self._score([rows[index] for index in batch])
        return ModelScores(values, cut)

    def sleep(self, residency: Residency) -> SleepReport:
        return self._weights.sleep(residency)

    def wake(self, residency: Residency) -> None:
        self._weights.wake(residency)

    def close(self) -> None:
        del self._model

    def _tokens(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        texts = [self._text(conversation) for conversation in conversations]
        # The template has already written the special tokens. One call for all uses several threads.
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _text(self, conversation: Conversation) -> str:
        try:
            return self._tokenizer.apply_chat_template(list(conversation), tokenize=False)
        except (TemplateError, TypeError) as error:  # TypeError: an expression failed
            roles = ", ".join(str(message.get("role")) for message in conversation)
            raise ValueError(
                f"the reward model's chat template rejects a conversation of {roles}: {error}; put one that accepts it "
                "into its folder, as chat_template.jinja"
            ) from error

    def _end_of(self, row: list[int]) -> list[int]:
        """Keep the last tokens that fit into the model's context; an encoder also keeps its first token."""
        too_many, kept = len(row) - self._longest, 0 if self._fills_left else 1
        return row if too_many <= 0 else row[:kept] + row[kept + too_many :]

    @torch.no_grad()
    def _score(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(len(row) for row in rows)
        # Padding is masked, so any token works; some tokenizers have none for padding.
        ids = torch.full((len(rows), longest), self._tokenizer.pad_token_id or 0)
        known = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            place = slice(longest - len(row), longest) if self._fills_left else slice(len(row))
            ids[index, place] = torch.tensor(row)
            known[index, place] = 1
        inputs = {"input_ids": ids, "attention_mask": known}
        if self._fills_left and self._takes_positions:
            # Some models count positions from the start of the batch, including padding.
            inputs["position_ids"] = (known.cumsum(1) - 1).clamp(min=0)
        device = next(self._model.parameters()).device
        output = self._model(**{name: tensor.to(device) for name, tensor in inputs.items()})
        return output.logits[:, 0].float().cpu().numpy()


def _batches(lengths: Sequence[int], most_rows: int, most_tokens: int) -> Iterator[np.ndarray]:
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    begin = 0
    while begin < len(order):
        fit = most_tokens // max(1, lengths[order[begin]])
        end = begin + max(1, min(most_rows, fit))
        yield order[begin:end]
        begin = end


def _config(model: ModelSpec) -> PretrainedConfig:
    config = load_hf_config(model)
    if model.path is None:
        config.num_labels = 1
    elif config.num_labels != 1:
        raise ValueError(
            f"{model.path} is a classifier with {config.num_labels} labels, but a reward model has one, its score; "
            "use a sequence classifier with num_labels 1"
        )
    return config


def _read(model: ModelSpec, config: PretrainedConfig) -> PreTrainedModel:
    with model_imports(model):
        from transformers import AutoModelForSequenceClassification

    assert model.path is not None
    device, dtype = device_and_dtype()
    try:
        built, report = AutoModelForSequenceClassification.from_pretrained(
            model.path.expanduser(),
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot load a reward model from {model.path}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise ValueError(
            f"{model.path} is not a reward model: it has no weights for {missing}; "
            "use a sequence classifier with one label"
        )
    for name, parameter in built.named_parameters():
        check_finite(parameter, f"{model.path}: tensor {name!r} {list(parameter.shape)}")
    avoid_misaligned_grouped_mm(built)
    built = built.to(device).eval().requires_grad_(False)
    if not torch.cuda.is_available():
        for parameter in built.parameters():
            # The weights are memory-mapped from the file, and could not be offloaded.
            parameter.data = parameter.data.clone()
    return built


def _draw(model: ModelSpec, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model with random weights, whose score is meaningless, for testing pipelines."""
    with model_imports(model):
        from transformers import AutoModelForSequenceClassification

        built = unset_model(AutoModelForSequenceClassification, config)
    source = weight_source(model, seed)
    names = [*(name for name in source.names() if name != _LM_HEAD), SCORE]
    replace_weights(built, ((name, source.get(name)) for name in names))
    return built


def _score_in_float32(model: PreTrainedModel) -> None:
    """Compute the last layer in float32: bfloat16 would round different scores to one."""
    model.score.float()
    model.score.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
