"""Images in requests: what a program shows the policy, and which images each row of a trajectory has."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError
from PIL import Image
from seeing import VISION, seeing_model, settings_of

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.data.batch import Batch, Column
from dagrl.data.image_column import images_at, shared_image_columns
from dagrl.graph.inference import build_graph
from dagrl.model_files.images import image_starts
from dagrl.model_files.tokenizer import load_tokenizer
from dagrl.ops.agents import messages as agent_images
from dagrl.ops.agents.context_writer import ContextWriter
from dagrl.ops.agents.gateway import Gateway
from dagrl.ops.agents.messages import ImageReader
from dagrl.ops.agents.session import Session
from dagrl.ops.agents.tree import SampledSequence, TrajectoryTree
from dagrl.ops.base import OpInput
from dagrl.ops.rollout import rollout
from dagrl.ops.turns.settings import hermes_calls

_INIT = seeing_model().init
assert _INIT is not None
MODEL = ModelSpec(
    init={name: value for name, value in _INIT.items() if name not in ("vocab_size", "image_token_id")},
    tokenizer=TokenizerSpec(kind="characters", alphabet=ascii_lowercase, images=True),
)
SETTINGS = replace(settings_of(MODEL), min_pixels=64)
TOKENIZER = load_tokenizer(MODEL)
MARK = "<|image_pad|>"


def png(shade: int, height: int = 8, width: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 255 - shade)).save(file, format="PNG")
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: str | bytes) -> dict[str, Any]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part), "detail": "high"}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def shade(pixels: np.ndarray) -> int:
    return int(pixels[0, 0, 0])


class Policy:
    """Says letters in turn."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def ask(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        said = TOKENIZER.encode(ascii_lowercase[-len(self.asked)])
        tokens = np.array([*said, TOKENIZER.eos_token_id], dtype=np.int64)
        return Completion(0, tokens, np.full(2, -0.5, np.float32), "stop", 3)


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    return Gateway("127.0.0.1")


@pytest.fixture
def policy() -> Policy:
    return Policy()


@pytest.fixture
def session(gateway: Gateway, policy: Policy) -> Iterator[Session]:
    tree = TrajectoryTree(np.array([1]), 7, 100, 100)
    writer = ContextWriter(TOKENIZER, SETTINGS)
    made = Session(tree, writer, lambda tools: hermes_calls, True, policy.ask, 100, ImageReader(SETTINGS))
    gateway.add(made)
    yield made
    gateway.remove(made)


def asked(gateway: Gateway, session: Session, ask: Callable[[AsyncOpenAI], Any]) -> Any:
    async def run() -> Any:
        async with AsyncOpenAI(base_url=gateway.url, api_key=session.key, max_retries=0) as client:
            return await ask(client)

    return asyncio.run(run())


def chat(gateway: Gateway, session: Session, *messages: Any) -> Any:
    create = {"model": "x", "messages": messages}
    return asked(gateway, session, lambda client: client.chat.completions.create(**create)).choices[0].message


def check_places(sequence: SampledSequence, shades: list[int]) -> str:
    """The text of a sequence, each image of which is its mark once, with these images at their tokens."""
    tokens, length = np.concatenate([sequence.prompt, sequence.tokens]), len(sequence.prompt)
    placed = [*sequence.prompt_images, *(each.moved(length) for each in sequence.images)]
    assert [shade(each.image.pixels) for each in placed] == shades
    sizes = np.array([each.image.pixels.shape[:2] for each in placed])
    assert [each.begin for each in placed] == image_starts(tokens, sizes, SETTINGS).tolist()
    text = str(TOKENIZER.decode(tokens))
    for each in placed:
        assert (tokens[each.begin : each.end] == SETTINGS.token).all()
        text = text.replace(MARK * (each.end - each.begin), "*", 1)
    return text


def test_a_conversation_continues_after_its_images(gateway, session, policy, monkeypatch) -> None:
    decoded = []
    resized = agent_images.resized
    monkeypatch.setattr(agent_images, "resized", lambda *given: decoded.append(0) or resized(*given))
    first = user("look", png(1), "at")
    said = chat(gateway, session, first)
    chat(gateway, session, first, said, user(png(2, 16), "b", png(1), "c"))
    assert len(decoded) == 2, "an image that the conversation holds is not decoded again"
    begin, then = policy.asked
    assert then.prompt.tolist() == begin.prompt.tolist() and not len(begin.image_starts)
    assert [shade(each) for each in begin.images] == [1] and [shade(each) for each in then.images] == [1, 2, 1]
    assert then.images[0] is then.images[2]
    assert then.image_starts.tolist() == [2, 7], "after the reply and its end, after 4 tokens and a letter"
    (sequence,) = session.tree.sequences(9)
    assert check_places(sequence, [1, 2, 1]) == "look*atz<eos>*b*cy<eos>"
    assert len(sequence.prompt_images) == 1 and len(sequence.images) == 2


def test_responses_hold_images(gateway, session) -> None:
    def shown(data: bytes) -> dict[str, str]:
        return {"type": "input_image", "image_url": url(data), "detail": "auto"}

    async def talk(client: AsyncOpenAI) -> None:
        asking = {"role": "user", "content": [shown(png(3)), {"type": "input_text", "text": "a"}]}
        first = await client.responses.create(model="x", input=[asking])
        found = {"type": "function_call_output", "call_id": "c", "output": [shown(png(4))]}
        await client.responses.create(model="x", previous_response_id=first.id, input=[found])

    asked(gateway, session, talk)
    (sequence,) = session.tree.sequences(9)
    assert check_places(sequence, [3, 4]) == "*az<eos>*y<eos>"


def test_branches_and_rewritten_conversations_keep_their_images(gateway, session) -> None:
    first = user("look", png(1))
    said = chat(gateway, session, first)
    for number in (2, 3):
        chat(gateway, session, first, said, user("and", png(number)))
    # The same words and number of tokens, but another image: another conversation.
    chat(gateway, session, user("look", png(4)), said, user("and", png(2)))
    rewritten, *branches = session.tree.sequences(9)
    assert check_places(rewritten, [4, 2]) == "look*zand*w<eos>"
    assert sorted(check_places(each, shades) for each, shades in zip(branches, ([1, 3], [1, 2]), strict=True)) == [
        "look*z<eos>and*x<eos>",
        "look*z<eos>and*y<eos>",
    ]
    assert len(session.images) == 4
    # The first to follow a reply goes on with its seed.
    assert len({each.seed for each in session.tree.exchanges}) == 4 - 1


def test_a_prompt_that_is_too_long_continues_in_the_response_before_an_image(gateway, session, policy) -> None:
    session.tree.longest_prompt = 5
    chat(gateway, session, user("look", png(1), "x"))
    (request,) = policy.asked
    assert (len(request.prompt), request.image_starts.tolist(), len(request.begun)) == (4, [0], 3)
    with pytest.raises(BadRequestError, match="begins with an image of 8 tokens") as refused:
        chat(gateway, session, user(png(1, 16, 32)))
    assert refused.value.code == "context_length_exceeded"


def test_text_that_looks_like_an_image_is_text(gateway, session, policy) -> None:
    chat(gateway, session, {"role": "system", "content": MARK}, user(MARK, png(1), MARK))
    (request,) = policy.asked
    assert (request.prompt == SETTINGS.token).sum() == 2
    create = {"model": "x", "prompt": [5, SETTINGS.token]}
    with pytest.raises(BadRequestError, match="tokens of images need images"):
        asked(gateway, session, lambda client: client.completions.create(**create))


def bomb() -> bytes:
    """A small file of 400 million pixels."""
    size = struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    head = struct.pack(">I", len(size)) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
    data = b"IDAT" + zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + head + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "fetches no images; send them as"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "fetches no images"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "sent as data:image/png;base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "not in base64"),
        ({"type": "image_url", "image_url": {"url": url(png(1)[:45])}}, "cannot be read as PNG, JPEG, WEBP, GIF"),
        ({"type": "image_url", "image_url": {"url": url(POSTSCRIPT)}}, "cannot be read as PNG, JPEG, WEBP, GIF"),
        ({"type": "image_url", "image_url": {"url": url(bomb())}}, "pixels"),
        ({"type": "image_url", "image_url": {"url": url(png(1, 8, 3000))}}, "200 times as long as wide"),
        ({"type": "input_image", "file_id": "file-1"}, "fetches no images"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported"),
    ],
)
def test_data_that_is_no_image_is_refused(gateway, session, part, named) -> None:
    with pytest.raises(BadRequestError, match=named):
        chat(gateway, session, {"role": "user", "content": [part]})
    assert not session.images


def test_images_have_a_place_and_a_size(gateway, session, monkeypatch) -> None:
    with pytest.raises(BadRequestError, match="roles user and tool, not system"):
        chat(gateway, session, {**user(png(1)), "role": "system"})
    monkeypatch.setattr("dagrl.ops.agents.messages._IMAGE_BYTES", 60)
    with pytest.raises(BadRequestError, match="MiB; send a smaller one"):
        chat(gateway, session, user(png(1)))
    session.reader = ImageReader(None)
    monkeypatch.undo()
    with pytest.raises(BadRequestError, match=r"set `data\.image_key`"):
        chat(gateway, session, user(png(1)))


LOOKS = """
SCREEN = "{screen}"

async def solve(client, row):
    messages, most = list(row["messages"]), {{"model": "x", "max_tokens": 4}}
    answer = await client.chat.completions.create(messages=messages, **most)
    shown = [{{"type": "image_url", "image_url": {{"url": SCREEN}}}}, {{"type": "text", "text": "c"}}]
    messages += [answer.choices[0].message, {{"role": "user", "content": shown}}]
    await client.chat.completions.create(messages=messages, **most)
    if row["sample_id"] == 1:
        # A conversation without the row's images.
        await client.chat.completions.create(messages=[{{"role": "user", "content": shown}}], **most)
    return 1.0
"""
SHADES = np.random.default_rng(3).integers(0, 256, (2, 16, 24, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def engine() -> Any:
    from dagrl.backends.hf.engine import HfEngine
    from dagrl.backends.hf.section import HfEngineSpec

    spec = HfEngineSpec(backend="hf", group="rollout")
    return HfEngine(MODEL, spec, RankContext(0, 1, "127.0.0.1", 0, 60.0, 3))


def sampled(bench: Any, engine: Any, agent: str | None) -> Batch:
    """Four rows of two prompts with two images each."""
    node = {"op": "rollout", "engine": "generator", "n": 2, "sampling": {"max_new_tokens": 40}}
    node |= {"agent": {"function": agent}} if agent else {}
    data = {"image_key": "images", "min_pixels": 64, "max_prompt_tokens": 20}
    context = bench.context("rollout", engine=engine, nodes={"rollout": node}, data=data, model=MODEL.model_dump())
    letters = dict(zip("ab", TOKENIZER.convert_tokens_to_ids(["a", "b"]), strict=True))
    prompt = np.array([*[SETTINGS.token] * 6, letters["a"], SETTINGS.token, letters["b"]])
    message = json.dumps([{"role": "user", "content": "<image>a<image>b"}])
    groups = [(SHADES[0], SHADES[0, :8, :8]), (SHADES[1], SHADES[1, :8, :8])]
    images = [[np.ascontiguousarray(each) for each in group] for group in groups]
    texts = {"messages": message, "answer": "z", "data_source": "", "extra_info": "{}", "image_names": '["p", "q"]'}
    batch = Batch(
        np.arange(4),
        {
            "prompt_tokens": Column.ragged([prompt] * 4, "int64"),
            "group_id": Column(np.repeat([0, 1], 2)),
            **{name: Column.text([text] * 4) for name, text in texts.items()},
            **shared_image_columns([images[row // 2] for row in range(4)]),
        },
    )
    outputs = list(rollout([OpInput(0, batch)], context))
    written = build_graph(context.pipeline, bench.folder).nodes["rollout"].contract.writes
    assert all(set(each.columns) | {"routed_experts"} >= set(written) for each in outputs)
    whole = Batch.concat([Batch(output.rows, output.columns) for output in outputs])
    return whole.in_order(np.arange(4))


def test_rows_have_the_images_that_the_policy_has_seen(bench, engine) -> None:
    """Log-probs equal those of the library for the tokens and images of the row."""
    import torch

    from dagrl.backends.runtime.vision import SeenPrompt, patches

    bench.write_module("looking", LOOKS.format(screen=url(png(9, 20, 30))))
    sys.modules.pop("looking", None)
    plain, rows = sampled(bench, engine, None), sampled(bench, engine, "looking:solve")
    screen = agent_images._decoded("", png(9, 20, 30), SETTINGS).pixels
    for row in range(4):
        images, later = images_at(rows, row), images_at(rows, row, "response_")
        names = json.loads(bytes(rows["image_names"][row]))
        if row == 1:
            assert [each.tolist() for each in images] == [screen.tolist()] and not later
            assert len(names) == 1 and names[0].startswith("sha256:")
        else:
            first = SHADES[row // 2]
            assert [each.tolist() for each in images] == [first.tolist(), first[:8, :8].tolist()]
            assert [each.tolist() for each in later] == [screen.tolist()] and names == ["p", "q"]
            said = rows["response_tokens"][row][: (rows["token_turn"][row] == 1).sum()]
            assert said.tolist() == plain["response_tokens"][row][: len(said)].tolist(), "as without an agent"
        prompt, response = rows["prompt_tokens"][row], rows["response_tokens"][row]
        sizes = np.array([each.shape[:2] for each in images])
        places = SeenPrompt.of(prompt, sizes, SETTINGS).followed(
            len(prompt) + rows["response_image_starts"][row], np.array([each.shape[:2] for each in later]), SETTINGS
        )
        tokens = torch.tensor([[*prompt, *response]])
        pixels, grids = patches([*images, *later], SETTINGS, torch.device("cpu"), torch.float32)
        kinds = torch.zeros_like(tokens, dtype=torch.int)
        kinds[0, places.places] = 1
        mask = rows["response_mask"][row] > 0
        assert not (kinds[0, len(prompt) :].numpy() > 0)[mask].any()
        if (response[mask] == SETTINGS.token).any():
            continue  # The library would take it for a part of an image.
        with torch.inference_mode():
            seen = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
            logits = engine._model(input_ids=tokens, **seen).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        assert np.abs(expected - rows["rollout_logprob"][row])[mask].max() < 1e-5
    assert rows.columns["pixel_values"].index is not None, "rows of a group share their images"
    assert VISION["patch_size"] * 2 == SETTINGS.unit
