"""Questions to a judge that takes images: the images of the sample's prompt at their places in the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.config.schema import JudgeNode, Pipeline
from dagrl.model_files.images import MARKER, ImageSettings, fitting_size, image_settings, png_uri, resized
from dagrl.plugins.judging import PROMPT_FIELD, Judged, filled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type PromptImages = tuple[np.ndarray, ...]
"""PromptImages of a prompt, uint8 [height, width, 3]."""


def content(template: str, judged: Judged, images: PromptImages) -> str | list[dict[str, Any]]:
    """The question as text, or as parts of types ``text`` and ``image`` if there are images.

    Only the prompt marks images: a response that has the same text keeps it.
    """
    if not images:
        return filled(template, judged)
    before, after = (filled(part, judged) for part in template.split(PROMPT_FIELD))
    pieces = judged.prompt.split(MARKER)
    assert len(pieces) == len(images) + 1, "each image has its place in the prompt"
    texts = [before + pieces[0], *pieces[1:]]
    texts[-1] += after
    parts: list[dict[str, Any]] = []
    for text, image in zip(texts, [*images, None], strict=True):
        parts += [{"type": "text", "text": text}] if text else []
        parts += [{"type": "image", "image": image}] if image is not None else []
    return parts


def for_endpoint(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with images as OpenAI's protocol has them."""

    def sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"type": "image_url", "image_url": {"url": png_uri(part["image"])[0]}} if "image" in part else part

    return _with_parts(messages, sent)


def judge_settings(pipeline: Pipeline, node: JudgeNode) -> ImageSettings | None:
    """The settings of the judge's model, if it is shown images."""
    return image_settings(pipeline.model_of(str(node.engine)), pipeline.data) if node.images else None


def fitted(images: PromptImages, settings: ImageSettings) -> PromptImages:
    """PromptImages in sizes that the judge's model takes."""
    from PIL import Image

    fits = [fitting_size(image.shape[0], image.shape[1], settings) == image.shape[:2] for image in images]
    return tuple(
        image if fit else resized(Image.fromarray(image), settings) for image, fit in zip(images, fits, strict=True)
    )


def without_tokens(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, settings: ImageSettings
) -> list[dict[str, Any]]:
    """Messages whose text does not look like an image: a response may have sampled its token."""
    placeholder = _placeholder(tokenizer, settings)

    def cleaned(part: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**part, "text": part["text"].replace(placeholder, "")} if "text" in part else part

    return _with_parts(messages, cleaned)


def expanded(
    tokenizer: PreTrainedTokenizerBase, text: str, images: PromptImages, settings: ImageSettings
) -> np.ndarray:
    """Token ids of a question, int64, with the tokens of each image where the chat template names it.

    ValueError if it names other than the number of images.
    """
    placeholder = _placeholder(tokenizer, settings)
    pieces = text.split(placeholder)
    if len(pieces) != len(images) + 1:
        raise ValueError(
            f"the chat template writes {placeholder} {len(pieces) - 1} times for {len(images)} images; use that of the "
            "judge's model"
        )
    counts = settings.tokens(np.array([image.shape[:2] for image in images]))
    tokens: list[int] = tokenizer.encode(pieces[0], add_special_tokens=False)
    for count, piece in zip(counts.tolist(), pieces[1:], strict=True):
        tokens += [settings.token] * count + tokenizer.encode(piece, add_special_tokens=False)
    return np.array(tokens, dtype=np.int64)


def _placeholder(tokenizer: PreTrainedTokenizerBase, settings: ImageSettings) -> str:
    return str(tokenizer.convert_ids_to_tokens(settings.token))


def _with_parts(
    messages: Sequence[Mapping[str, Any]], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages with each part of their contents changed."""
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]
