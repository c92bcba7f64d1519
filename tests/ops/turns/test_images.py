"""Answers with images: their tokens, and what tools may return."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dagrl.config.schema import TokenizerSpec
from dagrl.model_files.images import ImageSettings
from dagrl.model_files.tokenizer import make_tokenizer
from dagrl.ops.response import Response, image_columns_of
from dagrl.ops.turns.dialogue import ResponseDialogue, TurnSettings, tool_answer
from dagrl.ops.turns.jobs import JobResult
from dagrl.ops.turns.template import Answer, MessageWriter

TOKENIZER = make_tokenizer(TokenizerSpec(kind="characters", alphabet="ab", images=True))
A, B, IMAGE = (TOKENIZER.convert_tokens_to_ids(token) for token in ("a", "b", "<|image_pad|>"))
SETTINGS = ImageSettings(IMAGE, 4, 2, 2, (0.5,) * 3, (0.5,) * 3, min_pixels=64)


def pixels(height: int, width: int) -> np.ndarray:
    return np.zeros((height, width, 3), dtype=np.uint8)


def test_images_precede_the_text_of_their_answer() -> None:
    writer = MessageWriter(TOKENIZER, [], 9, vision=SETTINGS)
    answers = [
        Answer("tool", "a", (pixels(8, 16), pixels(8, 8))),
        Answer("user", "b"),
        Answer("user", "", (pixels(8, 8),)),
    ]
    tokens = writer.tokens(answers, TOKENIZER.eos_token_id)
    assert tokens.tolist() == [IMAGE, IMAGE, IMAGE, A, B, IMAGE]
    assert writer.tokens(answers, IMAGE).tolist() == tokens.tolist(), "the policy may have sampled the same token"
    images = [image for answer in answers for image in answer.images]
    assert writer.image_starts(tokens, images).tolist() == [0, 2, 5]


def test_images_are_at_their_places_in_the_text() -> None:
    writer = MessageWriter(TOKENIZER, [], 9, vision=SETTINGS)
    answer = Answer("user", "aab", (pixels(8, 16), pixels(8, 8), pixels(8, 8)), (2, 3, 3))
    tokens = writer.tokens([answer], TOKENIZER.eos_token_id)
    assert tokens.tolist() == [A, A, IMAGE, IMAGE, B, IMAGE, IMAGE]


def test_a_response_knows_where_its_images_begin() -> None:
    response = Response(0, tokens=np.array([A, A])).with_observation(
        np.array([IMAGE, B]), [pixels(8, 8)], np.array([0])
    )
    response = response.with_observation(np.array([B, IMAGE, IMAGE]), [pixels(8, 16)], np.array([1]))
    columns = image_columns_of([response, Response(0)])
    assert columns["response_image_starts"][0].tolist() == [2, 5]
    assert columns["response_image_sizes"][0].tolist() == [[8, 8], [8, 16]]
    assert [len(columns[name][1]) for name in columns] == [0, 0, 0]


def test_tools_return_images_alone_or_among_texts() -> None:
    image = Image.new("RGB", (8, 8))
    assert tool_answer(JobResult(1, image)) == (image,)
    assert tool_answer(JobResult(1, ["look: ", image])) == ("look: ", image)
    assert tool_answer(JobResult(1, ["a", "b"])) == '["a", "b"]'


def test_images_are_resized_as_the_model_sees_them() -> None:
    def message(vision: ImageSettings | None) -> Answer:
        settings = TurnSettings({}, lambda _: (), None, 1, ends_on_error=False, vision=vision)
        return ResponseDialogue(settings, {"extra_info": {}})._answer("tool", ("a", Image.new("L", (20, 9)), "b"))

    answer = message(SETTINGS)
    assert (answer.text, [image.shape for image in answer.images]) == ("ab", [(8, 16, 3)])
    with pytest.raises(ValueError, match="answers with an image, but prompts have no images"):
        message(None)
