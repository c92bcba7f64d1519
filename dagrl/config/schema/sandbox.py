"""`agent.sandbox`: sandboxes for an agent's function."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dagrl.config.schema.section import Concurrency, OwnFunction, Seconds, Section


class SandboxSpec(Section):
    """A sandbox for each episode of an agent's function, which takes it as the keyword `sandbox`. See
    `docs/sandboxes.md`.
    """

    provider: Literal["local", "docker", "kubernetes"] | OwnFunction = "local"
    """``local`` (processes of this machine), ``docker`` (also Podman), ``kubernetes``, or your own class,
    ``module:Class``."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further arguments of the provider, such as ``namespace`` of ``kubernetes``."""
    image: str | None = None
    """The image of its containers."""
    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """CPUs of a sandbox, which may be a fraction. Default: the provider's."""
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    """Memory of a sandbox, in MiB. Default: the provider's, for most no limit."""
    network: bool = False
    """Let it use the network."""
    warm: Annotated[int, Field(ge=0, le=4096)] = 0
    """Sandboxes that each worker that samples keeps ready, so that episodes do not wait for their start."""
    starting: Concurrency = 16
    """Sandboxes that start at a time, on each worker that samples."""
    start_timeout_s: Seconds = 300.0
    """Timeout of a start, in seconds."""
    lifetime_s: Seconds = 3600.0
    """Time after which a sandbox ends by itself, in seconds; at least twice `timeout_s` of the agent."""
