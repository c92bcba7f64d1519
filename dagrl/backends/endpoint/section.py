"""``backend: endpoint``: a model behind an OpenAI endpoint."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dagrl.config.capability import Capability
from dagrl.config.schema.engine import EngineSpec
from dagrl.config.schema.section import Concurrency, Seconds


class EndpointEngineSpec(EngineSpec):
    """A model behind an OpenAI endpoint, for `dagrl eval`: it returns text, which cannot be trained on."""

    backend: Literal["endpoint"]
    """A client. ``model.tokenizer`` must be ``{kind: messages}``, whose prompts are the messages of a chat."""
    url: Annotated[str, Field(pattern=r"^https?://[^/?#\s]")]
    """The endpoint, the part before ``/chat/completions``."""
    model_name: Annotated[str, Field(min_length=1)]
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable that holds the key for the endpoint. Default: no key."""
    retries: Annotated[int, Field(ge=0, le=100)] = 4
    """Retries of a request, for connection errors, timeouts, rate limits and server errors."""
    timeout_s: Seconds = 600.0
    """Longest wait for a reply, in seconds."""
    concurrency: Concurrency = 32
    """Requests at a time."""

    capabilities: ClassVar = frozenset({Capability.GENERATE})
