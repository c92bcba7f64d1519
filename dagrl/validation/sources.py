"""Settings of single sources of prompts: whether they have an effect, and fit those of all sources."""

from __future__ import annotations

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline, TrainSourceSpec


def check_sources(pipeline: Pipeline, findings: Findings) -> None:
    """Report settings of sources that have no effect, or exceed those of all sources."""
    longest = pipeline.data.max_prompt_tokens
    for key, spec in pipeline.data.by_key.items():
        place: Place = ("data", *key.split("."))
        if not isinstance(spec, TrainSourceSpec):
            continue
        if spec.max_prompt_tokens is not None and spec.max_prompt_tokens > longest:
            message = f"data.max_prompt_tokens = {longest} bounds the prompts of all sources; raise that, or lower this"
            findings.error((*place, "max_prompt_tokens"), message, "prompt-too-long")
        for option in ("n", "sampling") if pipeline.is_offline else ():
            if getattr(spec, option) is not None:
                findings.superfluous((*place, option), "no node trains on responses that are sampled for its prompts")
