"""``judge``: scores each response by a language model, behind an endpoint or on an engine of the pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.config.schema import JudgeNode, Pipeline
from dagrl.data.batch import Batch, Column
from dagrl.data.image_column import images_at
from dagrl.data.stats import Stat
from dagrl.endpoint import EndpointError, EndpointReply, EndpointSetupError, endpoint_of
from dagrl.model_files.images import MARKER, ImageSettings, fitting_size, image_settings, png_uri, resized
from dagrl.ops.base import Context, OpInput, Output, Resources
from dagrl.ops.reward import reward_stats, scored_text
from dagrl.ops.rollout import sample_seed
from dagrl.ops.selected_rows import selected_rows, spread_values
from dagrl.ops.trajectories import first_rows
from dagrl.plugins.calls import call_or_stop
from dagrl.plugins.custom import load_function
from dagrl.plugins.judging import PROMPT_FIELD, Judged, filled, finite, is_function, parse, parser_arguments, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type _Message = dict[str, Any]
"""A message of a chat, or a part of its content."""
type PendingReply = Callable[[], EndpointReply]
"""Waits for the reply to one question. Raises EndpointError or ValueError."""


class JudgeError(ValueError):
    """A response without a score; the message names the sample and shows the judge's reply."""


@dataclass(frozen=True, slots=True)
class _JudgeScore:
    """Score of a response."""

    value: float
    failed: bool = False
    unanswered: bool = False
    """Whether it failed because the endpoint has not answered."""
    tokens: int | None = None


def judge(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the scores of each shard. Raises JudgeError for a response without a score if ``on_error`` is stop.

    The questions of all shards are asked concurrently, up to the node's limit.
    """
    node = context.declared(JudgeNode)
    batches = [first_rows(part.batch, context) for part in parts]
    chosen = [selected_rows(node, batch, context) for batch in batches]
    firsts = [
        OpInput(part.index, batch if rows is None else batch.take(rows))
        for part, batch, rows in zip(parts, batches, chosen, strict=True)
    ]
    judged = [_judged(part.batch, context) for part in firsts]
    read = context.resources.once(f"parser of {node!r}", lambda: _reader(node, context.resources))
    # Closed explicitly, so that pending questions are cancelled as soon as a response fails.
    with closing((_over_endpoint if node.endpoint else _on_engine)(firsts, judged, node, context)) as asked:
        for part, rows, first, texts, askings in zip(parts, chosen, firsts, judged, asked, strict=True):
            judge_scores = [
                _judge_score(asking, text, read, node, f"sample {row}")
                for asking, text, row in zip(askings, texts, first.batch.rows.tolist(), strict=True)
            ]
            yield _output(part, rows, judge_scores, node, context.sequences)


def _output(
    part: OpInput, rows: np.ndarray | None, judge_scores: Sequence[_JudgeScore], node: JudgeNode, sequences: int
) -> Output:
    scores = np.array([score.value for score in judge_scores], dtype=np.float32)
    counted = [score.tokens for score in judge_scores if score.tokens is not None]
    stats = {
        "judge/failed_fraction": Stat.of([score.failed for score in judge_scores]),
        **reward_stats(node, scores),
        **({"judge/reply_tokens": Stat.of(counted)} if counted else {}),
    }
    if node.endpoint and node.on_error != "stop":
        stats["failed/judge"] = Stat.of([score.unanswered for score in judge_scores])
    sampled = sum(counted) if node.engine else 0
    spread = spread_values(scores, rows, len(part.batch) // sequences).values
    columns = {"reward": Column(np.repeat(spread, sequences))}
    return Output((part.index,), part.batch.rows, columns, stats, sampled=sampled)


def _judged(batch: Batch, context: Context) -> list[Judged]:
    answers, sources = batch["answer"].strings(), batch["data_source"].strings()
    prompts = [_conversation_text(json.loads(text)) for text in batch["messages"].strings()]
    responses = [scored_text(batch, row, context) for row in range(len(batch))]
    return [Judged(*texts) for texts in zip(prompts, responses, answers, sources, strict=True)]


def _conversation_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Text of a prompt; a single message without its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _messages(node: JudgeNode, judged: Judged, images: PromptImages) -> list[_Message]:
    system = [{"role": "system", "content": node.system}] if node.system else []
    return [*system, {"role": "user", "content": content(node.prompt, judged, images)}]


# -- over an endpoint


def _over_endpoint(
    parts: Sequence[OpInput], judged: Sequence[Sequence[Judged]], node: JudgeNode, context: Context
) -> Generator[list[PendingReply]]:
    endpoint = context.resources.once(f"endpoint of {node!r}", lambda: endpoint_of(node))
    pool = ThreadPoolExecutor(node.concurrency, thread_name_prefix="judge")
    asked: list[list[Future[EndpointReply]]] = [
        [
            pool.submit(endpoint.ask, for_endpoint(_messages(node, text, images)), node.sampling, node.extra_body)
            for text, images in zip(texts, _images(part, node), strict=True)
        ]
        for part, texts in zip(parts, judged, strict=True)
    ]
    try:
        for futures in asked:
            yield [future.result for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# -- on an engine


def _on_engine(
    parts: Sequence[OpInput], judged: Sequence[Sequence[Judged]], node: JudgeNode, context: Context
) -> Generator[list[PendingReply]]:
    """Replies of each part; the engine generates all parts together."""
    engine = context.generator
    tokenizer = context.resources.once(f"tokenizer of {node.engine}", lambda: _tokenizer(node, context.resources))
    settings = judge_settings(context.pipeline, node)
    questions: list[list[np.ndarray]] = []
    places, requests = [], []
    for index, (part, texts) in enumerate(zip(parts, judged, strict=True)):
        questions.append([])
        for place, (text, images) in enumerate(zip(texts, _images(part, node), strict=True)):
            images = fitted(images, settings) if settings else images
            tokens = _tokens(tokenizer, _messages(node, text, images), node, images, settings)
            questions[-1].append(tokens)
            if len(tokens) <= node.max_prompt_tokens:
                places.append((index, place))
                seed = _seed(node, int(part.batch.rows[place]), context)
                requests.append(GenerationRequest(tokens, seed, images=images))
    replies: dict[tuple[int, int], Completion] = {}
    for completion in engine.generate(requests, node.sampling) if requests else ():
        replies[places[completion.index]] = completion
    for index, those in enumerate(questions):
        yield [
            partial(_said, replies[index, place], tokenizer)
            if (index, place) in replies
            else partial(_too_long, tokens, node)
            for place, tokens in enumerate(those)
        ]


def _images(part: OpInput, node: JudgeNode) -> list[PromptImages]:
    return [tuple(images_at(part.batch, row)) if node.images else () for row in range(len(part.batch))]


def _seed(node: JudgeNode, row: int, context: Context) -> int:
    """The seed differs from the response's seed and from seeds of other judges."""
    own = list(context.pipeline.nodes.values()).index(node)
    return int(np.random.SeedSequence([sample_seed(context, row), own]).generate_state(1, np.uint64)[0])


def _tokenizer(node: JudgeNode, resources: Resources) -> PreTrainedTokenizerBase:
    from dagrl.model_files.tokenizer import load_tokenizer

    assert node.engine is not None
    tokenizer = load_tokenizer(resources.pipeline.model_of(node.engine))
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of `{node.engine}` has no chat template; put the one it was trained with into its folder, "
            "as chat_template.jinja"
        )
    return tokenizer


def _tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[_Message],
    node: JudgeNode,
    images: PromptImages,
    settings: ImageSettings | None,
) -> np.ndarray:
    from jinja2 import TemplateError

    if settings is not None and images:
        messages = without_tokens(messages, tokenizer, settings)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **node.chat_template_kwargs
        )
    except (TemplateError, TypeError) as error:  # TypeError: an expression failed
        roles = " and ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template of `{node.engine}` takes no message of {roles}: {error}") from error
    # The template has already written the special tokens.
    if settings is not None and images:
        return expanded(tokenizer, text, images, settings)
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def _said(reply: Completion, tokenizer: PreTrainedTokenizerBase) -> EndpointReply:
    return EndpointReply(tokenizer.decode(reply.tokens, skip_special_tokens=True), len(reply.tokens))


def _too_long(tokens: np.ndarray, node: JudgeNode) -> EndpointReply:
    raise ValueError(
        f"the question has {len(tokens)} tokens, more than max_prompt_tokens, {node.max_prompt_tokens}; raise that "
        "if the judge's context is long enough"
    )


# -- scores


def _reader(node: JudgeNode, resources: Resources) -> Callable[[str, Judged], float]:
    if not is_function(node.parser):
        pattern = re.compile(node.parser)
        return lambda reply, _: parse(reply, pattern, node.scores)
    function = load_function(node.parser, resources.folder)
    names = parser_arguments(function)

    def own(reply: str, judged: Judged) -> float:
        arguments = {**asdict(judged), "reply": reply}
        return finite(call_or_stop(node.parser, function, {name: arguments[name] for name in names}))

    return own


def _judge_score(
    asking: PendingReply, judged: Judged, read: Callable[[str, Judged], float], node: JudgeNode, who: str
) -> _JudgeScore:
    answer = None
    try:
        answer = asking()
        return _JudgeScore(read(answer.text, judged), tokens=answer.tokens)
    except EndpointSetupError as error:
        raise JudgeError(f"the judge cannot be asked: {error}") from error
    except (EndpointError, ValueError) as error:
        if node.on_error != "stop":
            unanswered = isinstance(error, EndpointError)
            tokens = answer.tokens if answer else None
            return _JudgeScore(float(node.on_error), failed=True, unanswered=unanswered, tokens=tokens)
        what = f"there is no score in the judge's reply: {error}" if answer else f"the judge has not answered: {error}"
        reply = f"\n  reply: {shown(answer.text)}" if answer else ""
        raise JudgeError(
            f"{what}\n  {who} data_source: {judged.data_source}\n  prompt: {shown(judged.prompt)}\n"
            f"  response: {shown(judged.response)}{reply}"
        ) from error


type PromptImages = tuple[np.ndarray, ...]
"""Images of a prompt, uint8 [height, width, 3]."""


def content(template: str, judged: Judged, images: PromptImages) -> str | list[_Message]:
    """The question as text, or as parts of types ``text`` and ``image`` if there are images.

    Only the prompt marks images: the same text in a response is kept.
    """
    if not images:
        return filled(template, judged)
    before, after = (filled(part, judged) for part in template.split(PROMPT_FIELD))
    pieces = judged.prompt.split(MARKER)
    assert len(pieces) == len(images) + 1, "each image has its place in the prompt"
    texts = [before + pieces[0], *pieces[1:]]
    texts[-1] += after
    parts: list[_Message] = []
    for text, image in zip(texts, [*images, None], strict=True):
        parts += [{"type": "text", "text": text}] if text else []
        parts += [{"type": "image", "image": image}] if image is not None else []
    return parts


def for_endpoint(messages: Sequence[_Message]) -> list[_Message]:
    def sent(part: _Message) -> _Message:
        return {"type": "image_url", "image_url": {"url": png_uri(part["image"])[0]}} if "image" in part else part

    return _with_parts(messages, sent)


def judge_settings(pipeline: Pipeline, node: JudgeNode) -> ImageSettings | None:
    return image_settings(pipeline.model_of(str(node.engine)), pipeline.data) if node.images else None


def fitted(images: PromptImages, settings: ImageSettings) -> PromptImages:
    from PIL import Image

    fits = [fitting_size(image.shape[0], image.shape[1], settings) == image.shape[:2] for image in images]
    return tuple(
        image if fit else resized(Image.fromarray(image), settings) for image, fit in zip(images, fits, strict=True)
    )


def without_tokens(
    messages: Sequence[_Message], tokenizer: PreTrainedTokenizerBase, settings: ImageSettings
) -> list[_Message]:
    """Messages whose text is not read as an image: a response may have sampled an image token."""
    placeholder = _placeholder(tokenizer, settings)

    def cleaned(part: _Message) -> _Message:
        return {**part, "text": part["text"].replace(placeholder, "")} if "text" in part else part

    return _with_parts(messages, cleaned)


def expanded(
    tokenizer: PreTrainedTokenizerBase, text: str, images: PromptImages, settings: ImageSettings
) -> np.ndarray:
    """Token ids of a question, int64, with the tokens of each image where the chat template names it.

    Raises ValueError if their numbers differ.
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


def _with_parts(messages: Sequence[_Message], change: Callable[[_Message], _Message]) -> list[_Message]:
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]
