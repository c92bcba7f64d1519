"""Checks of settings of single sources of prompts: effect, and consistency with all sources."""

from __future__ import annotations

from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import FilterNode, Pipeline, RewardNode, TrainSourceSpec


def _check_names(pipeline: Pipeline, findings: Findings) -> None:
    data = pipeline.data
    sampled = {} if pipeline.is_offline else data.sources
    validated = data.val_sets if pipeline.run.validates else {}
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name, "by_source")
        if not isinstance(node, RewardNode | FilterNode):
            continue
        # Validation is not filtered.
        known = [*data.sources, *(data.val_sets if isinstance(node, RewardNode) else ())]
        for source in node.by_source:
            if source not in known:
                kind = "source or validation set" if isinstance(node, RewardNode) else "source"
                findings.error(
                    (*place, source), f"there is no {kind} `{source}`; {suggest(source, known)}", "unknown-source"
                )
        if isinstance(node, RewardNode) and node.fn is None:
            if node.args:
                message = "are arguments of `fn`, which is missing"
                findings.superfluous(("nodes", name, "args"), message, "move them to the functions of `by_source`")
            for source in dict.fromkeys((*sampled, *validated)):
                if source not in node.by_source:
                    message = f"`{source}` has no reward; add it here, or a function for all others with `fn`"
                    findings.error(place, message, "source-without-reward")


def check_sources(pipeline: Pipeline, findings: Findings) -> None:
    """Report settings of sources that have no effect, or exceed those of all sources."""
    _check_names(pipeline, findings)
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
