"""Messages of OpenAI's chat protocol: in the form for chat templates, and as keys that identify a conversation."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from dagrl.backends.tool_calls import Call
from dagrl.data.batch import Batch
from dagrl.data.image_column import images_at
from dagrl.model_files.images import ImageSettings, marked_parts, png_uri, resized
from dagrl.ops.agents.tree import SeenImage

_IMAGE_BYTES = 32 << 20
_ROLES = ("system", "user", "assistant", "tool")
FOLLOWING = ("user", "tool", "system")
"""Roles of messages that can follow a reply without encoding the whole conversation again."""


class RequestError(ValueError):
    """A request that the endpoint cannot answer."""


type JsonObject = dict[str, Any]
type Message = JsonObject
"""``role`` and ``content``; an assistant's may have ``tool_calls`` whose arguments are objects.

The content is a string, or with images a list of parts ``{type: text, text}`` and ``{type: image}``; ``images`` then
has the SHA-256 of each of them.
"""


def message_of(given: object, sent: dict[str, bytes]) -> Message:
    """Convert a message for the chat template; adds its images by their SHA-256 to `sent`. Raises RequestError."""
    if not isinstance(given, Mapping):
        raise RequestError(f"a message is an object with role and content, not {given!r:.80}")
    role = "system" if given.get("role") == "developer" else given.get("role")
    if role not in _ROLES:
        raise RequestError(f"there is no role {role!r}; choose one of {', '.join(_ROLES)}")
    content, images = _content_of(given.get("content"))
    message: Message = {"role": role, "content": content}
    if images:
        if role not in ("user", "tool"):
            raise RequestError(f"images are in messages of the roles user and tool, not {role}")
        message["images"] = tuple(key for key, _ in images)
        sent.update(images)
    if role == "assistant" and (calls := given.get("tool_calls")):
        if not isinstance(calls, list):
            raise RequestError(f"`tool_calls` is a list, not {calls!r:.80}")
        message["tool_calls"] = [_call_of(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if isinstance(given.get(key), str):
            message[key] = given[key]
    return message


def _content_of(content: object) -> tuple[str | list[dict[str, str]], list[tuple[str, bytes]]]:
    """Convert a content for the chat template; returns it with SHA-256 and bytes of its images. Raises RequestError."""
    if content is None or isinstance(content, str):
        return content or "", []
    parts: list[dict[str, str]] = []
    images = []
    for given in content if isinstance(content, Sequence) else (content,):
        if (text := given.get("text") if isinstance(given, Mapping) else given) is not None:
            if not isinstance(text, str):
                raise RequestError(f"a part of a content has text, not {text!r:.80}")
            if parts and parts[-1]["type"] == "text":
                parts[-1]["text"] += text
            else:
                parts.append({"type": "text", "text": text})
            continue
        data = _image_of(given)
        images.append((hashlib.sha256(data).hexdigest(), data))
        parts.append({"type": "image"})
    return (parts, images) if images else ("".join(part["text"] for part in parts), [])


def _image_of(part: Any) -> bytes:
    """The bytes of an image of a content. Its ``detail`` is ignored: the pipeline sets the resolution. Raises
    RequestError.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("image_url", "input_image"):
        raise RequestError(f"a message's content is text and images, and {kind!r} is not supported")
    url = part.get("image_url")
    return _data_of(url.get("url") if isinstance(url, Mapping) else url)


def _data_of(url: object) -> bytes:
    if not isinstance(url, str) or not url.startswith("data:"):
        shown = f"{url:.80}" if isinstance(url, str) else "no text"
        raise RequestError(f"the endpoint fetches no images; send them as data:image/png;base64,..., not {shown!r}")
    kind, marker, text = url.partition(";base64,")
    if not marker or not kind.startswith("data:image/"):
        raise RequestError(f"an image is sent as data:image/png;base64,..., not {url:.40}...")
    if len(text) > _IMAGE_BYTES * 4 // 3:
        raise RequestError(f"an image has more than {_IMAGE_BYTES >> 20} MiB; send a smaller one")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"an image is not in base64: {error}") from error


def key_of(message: Message) -> bytes:
    """Bytes that are equal for messages with equal texts and images.

    Ids of calls and space around an assistant's text do not count: frameworks change both.
    """
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    content = [message["role"], text, calls, *message.get("images", ())]
    return json.dumps(content, sort_keys=True).encode()


def with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages with the names of the answering tools, taken from their calls; some templates write these."""
    named: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        names |= {str(call["id"]): call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        named.append({"name": name, **message} if message["role"] == "tool" and name else message)
    return named


def reply_message(text: str, calls: Sequence[Call], ids: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for key, call in zip(ids, calls, strict=True)
        ]
    return message


def _call_of(call: Any) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"a tool call has a function with a name, unlike {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            # The program has changed the policy's call, so the template's text is the program's.
            arguments = {"arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MOST_PIXELS = 1 << 25
"""Largest image that is decoded, before it is resized; a small file may hold far more pixels."""


class ImageReader:
    """Decodes images of requests; images of the trajectory are not decoded again. Used on the endpoint's loop."""

    def __init__(self, vision: ImageSettings | None) -> None:
        """`vision` is set for a policy that takes images."""
        self._vision = vision
        self._known: WeakValueDictionary[str, SeenImage] = WeakValueDictionary()
        self._under_way: dict[str, asyncio.Future[SeenImage]] = {}
        # Few threads, because an image may need hundreds of megabytes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="images")

    async def read(self, key: str, data: bytes) -> SeenImage:
        """The image in `data`, whose SHA-256 is `key`. Raises RequestError."""
        if self._vision is None:
            raise RequestError("the policy is given no images; set `data.image_key` of the pipeline to show it some")
        if (known := self._known.get(key)) is not None:
            return known
        if key not in self._under_way:
            loop = asyncio.get_running_loop()
            self._under_way[key] = work = loop.run_in_executor(self._threads, _decoded, key, data, self._vision)
            work.add_done_callback(lambda _: self._under_way.pop(key))
        # Another request may wait for it when this one is cancelled.
        self._known[key] = image = await asyncio.shield(self._under_way[key])
        return image


def _decoded(key: str, data: bytes, vision: ImageSettings) -> SeenImage:
    import PIL.Image

    try:
        image = PIL.Image.open(io.BytesIO(data), formats=_FORMATS)
        pixels = image.width * image.height
        if pixels <= _MOST_PIXELS:
            return SeenImage(f"sha256:{key}", resized(image, vision))
    except Exception as error:  # Pillow's decoders may raise anything for a broken file.
        raise RequestError(f"an image cannot be read as {', '.join(_FORMATS)}: {error}") from error
    raise RequestError(f"an image has {pixels} pixels, more than {_MOST_PIXELS}; send a smaller one")


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a row."""

    seen: tuple[SeenImage, ...] = ()
    urls: tuple[str, ...] = ()
    """The images as ``data:`` URLs."""
    keys: tuple[str, ...] = ()
    """SHA-256 of the images' bytes in `urls`."""

    def by_key(self) -> dict[str, SeenImage]:
        return dict(zip(self.keys, self.seen, strict=True))

    def messages(self, messages: Sequence[JsonObject]) -> list[JsonObject]:
        """Messages of the data set in OpenAI's protocol, with the images at their marks."""
        if not self.urls:
            return [dict(message) for message in messages]
        urls = iter(self.urls)

        def sent(part: dict[str, object]) -> dict[str, object]:
            return {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part

        return [
            message if isinstance(message["content"], str) else {**message, "content": [*map(sent, message["content"])]}
            for message in marked_parts(messages)
        ]


def images_of_rows(batch: Batch, rows: Sequence[int]) -> dict[int, RowImages]:
    """The images of these rows; rows that share images in memory share them here."""
    made: dict[tuple[int, ...], RowImages] = {}
    of_rows = {}
    for row in rows:
        images = images_at(batch, row)
        # Rows with the same images have the same memory.
        place = tuple(image.ctypes.data for image in images)
        if place not in made:
            names = json.loads(batch["image_names"].string(row)) if images else []
            made[place] = _row_images([SeenImage(*pair) for pair in zip(names, images, strict=True)])
        of_rows[row] = made[place]
    return of_rows


def _row_images(seen: Sequence[SeenImage]) -> RowImages:
    files = [png_uri(image.pixels) for image in seen]
    urls, keys = [url for url, _ in files], [hashlib.sha256(file).hexdigest() for _, file in files]
    return RowImages(tuple(seen), tuple(urls), tuple(keys))
