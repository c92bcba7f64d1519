"""A reward model of Hugging Face's: the scores are those of the model by itself, row by row, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_scorer
from transformers import AutoModelForSequenceClassification

from dagrl.backends.backend import RankContext
from dagrl.backends.hf.classifier import HfClassifier, _batches
from dagrl.backends.hf.section import HfEngineSpec
from dagrl.backends.runtime.device_memory import storages_of
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.tensor_names import SCORE
from dagrl.model_files.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
TALKS = [
    [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}],
    [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "23456789"}],
    [{"role": "system", "content": "9"}, {"role": "user", "content": "2="}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "7+7="}, {"role": "assistant", "content": "14<eos>"}],
]
ENDING = "{% for message in messages %}{{ message['content'] }}{% endfor %}<eos>"
"""Templates end what is said with a token that models often have for padding too."""


def build(model: ModelSpec, **fields: Any) -> HfClassifier:
    spec = HfEngineSpec(backend="hf", group="rollout", head="reward", **fields)
    return HfClassifier(model, spec, RankContext(0, 1, "127.0.0.1", 0, 10.0, 11))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(*, labels: int = 1, template: str | None = ENDING, **fields: Any) -> Path:
        config = {"vocab_size": len(TOKENIZER), "initializer_range": 0.4, "num_labels": labels, **fields}
        tiny_scorer(5, **config).save_pretrained(tmp_path)
        tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
        tokenizer.chat_template = template
        tokenizer.split_special_tokens = False
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(tmp_path)
        return tmp_path

    return make


def alone(folder: Path, talk: list[dict[str, str]]) -> float:
    """The score at the last token of a conversation that nothing was added to."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    words = "".join(message["content"] for message in talk).removesuffix("<eos>")
    ended = [TOKENIZER.eos_token_id] * (1 + talk[-1]["content"].endswith("<eos>"))
    ids = torch.tensor([TOKENIZER.encode(words) + ended])
    with torch.no_grad():
        return float(model.score(model.model(ids).last_hidden_state)[0, -1, 0])


@pytest.mark.parametrize("bounds", [(256, 1000), (3, 1000), (256, 13), (256, 1)])
def test_scores_are_those_of_the_model_alone(folder, bounds) -> None:
    path, (rows, tokens) = folder(), bounds
    engine = build(ModelSpec(path=path), max_batch_size=rows)
    scores = engine.scores(TALKS, tokens_per_micro_batch=tokens)
    assert scores.values.tolist() == pytest.approx([alone(path, talk) for talk in TALKS], abs=1e-5)
    assert not scores.cut.any()
    assert np.ptp(scores.values) > 0.01
    assert len(engine.scores([], tokens_per_micro_batch=tokens).values) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_counts_places_counts_a_rows_own(folder, monkeypatch, dtype) -> None:
    """In any batch, and on a GPU, where only the score itself is in float32."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    path = folder()
    config = GPT2Config(vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=4, num_labels=1, initializer_range=0.4)
    torch.manual_seed(5)
    GPT2ForSequenceClassification(config).save_pretrained(path)
    monkeypatch.setattr("dagrl.backends.hf.classifier.device_and_dtype", lambda: ("cpu", dtype))
    engine = build(ModelSpec(path=path))
    together = engine.scores(TALKS, tokens_per_micro_batch=1000).values
    alone = engine.scores(TALKS, tokens_per_micro_batch=1).values
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-5 if dtype is torch.float32 else 0.1)
    as_bfloat16 = torch.from_numpy(alone).bfloat16().float().numpy()
    assert (as_bfloat16 != alone).any()
    assert engine._model(torch.tensor([[3, 4]])).past_key_values is None


def test_too_long_input_is_cut_at_its_beginning(folder) -> None:
    path = folder(max_position_embeddings=6)
    scores = build(ModelSpec(path=path)).scores(TALKS, tokens_per_micro_batch=100)
    assert scores.cut.tolist() == [False, True, False, True]
    assert scores.values[1] == pytest.approx(alone(path, [{"role": "user", "content": "56789"}]), abs=1e-5)


def test_it_keeps_its_weights_while_it_sleeps(folder) -> None:
    engine = build(ModelSpec(path=folder()))
    before = engine.scores(TALKS, tokens_per_micro_batch=100).values.tolist()
    engine.sleep(Residency.ASLEEP)
    assert sum(each.nbytes() for each in storages_of(engine._model.parameters()).values()) == 0
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        engine.scores(TALKS, tokens_per_micro_batch=100)
    engine.wake(Residency.AWAKE)
    assert engine.scores(TALKS, tokens_per_micro_batch=100).values.tolist() == before


def test_random_weights_are_those_that_other_engines_draw() -> None:
    init = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tokenizer = TokenizerSpec(kind="characters", alphabet="0123456789+=")
    model = ModelSpec(init=init | heads, tokenizer=tokenizer)
    engine, source = build(model), weight_source(model, 11)
    weights = engine._model.state_dict()
    assert torch.equal(weights[SCORE], source.get(SCORE))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], source.get(name))


def test_a_template_that_refuses_a_conversation_is_reported(folder) -> None:
    strict = "{{ raise_exception('no system messages here') }}"
    engine = build(ModelSpec(path=folder(template=strict)))
    with pytest.raises(ValueError, match="rejects a conversation of user, assistant: no system messages here; "):
        engine.scores(TALKS[:1], tokens_per_micro_batch=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": 3}, r"is a classifier with 3 labels, but a reward model has one, its score; use a sequence"),
        ({"template": None}, r"has no chat template, which a reward model needs; put the one"),
    ],
)
def test_missing_parts_of_a_folder_are_reported(folder, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        build(ModelSpec(path=folder(**options)))


def test_a_language_models_folder_is_refused(folder) -> None:
    from safetensors.torch import load_file, save_file

    path = folder()
    weights = load_file(path / "model.safetensors")
    del weights[SCORE]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not a reward model: it has no weights for score\.weight; "):
        build(ModelSpec(path=path))


def test_weights_that_are_no_numbers_are_refused(folder) -> None:
    from safetensors.torch import load_file, save_file

    path = folder()
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' \[32\] has NaN or infinite values; copy it"):
        build(ModelSpec(path=path))


def test_a_model_that_is_read_at_its_first_token_keeps_it_and_is_filled_up_behind_its_last(folder) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    path = folder(template="=" + ENDING)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    positions = {"max_position_embeddings": 8}
    config = BertConfig(vocab_size=len(TOKENIZER), num_labels=1, initializer_range=0.4, **sizes, **positions)
    torch.manual_seed(5)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(path)
    scores = build(ModelSpec(path=path)).scores(TALKS, tokens_per_micro_batch=1000)
    assert scores.cut.tolist() == [False, True, False, True]
    for talk, cut, score in zip(TALKS[:3], scores.cut, scores.values.tolist(), strict=False):
        words = "".join(message["content"] for message in talk)
        words = "=" + (words[-6:] if cut else words)
        with torch.no_grad():
            alone = model(torch.tensor([[*TOKENIZER.encode(words), TOKENIZER.eos_token_id]])).logits
        assert score == pytest.approx(float(alone), abs=1e-5)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 5), st.integers(1, 60))
def test_batches_hold_each_row_once_within_both_bounds(lengths, most_rows, most_tokens):
    batches = list(_batches(lengths, most_rows, most_tokens))
    assert sorted(index for batch in batches for index in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[index] for index in batch)
        assert len(batch) <= most_rows and (len(batch) == 1 or len(batch) * width <= most_tokens)
