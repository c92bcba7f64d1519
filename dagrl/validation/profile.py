"""What the `profile` section asks for: that there is something to look into."""

from __future__ import annotations

from collections.abc import Iterable

from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline

_PLACE: Place = ("profile",)


def check_profile(pipeline: Pipeline, findings: Findings) -> None:
    """Report steps, nodes and ranks that the run does not have."""
    profile = pipeline.profile
    if profile is None:
        return
    last = pipeline.run.steps
    for index, step in enumerate(profile.steps):
        if step > last:
            message = f"the run ends with step {last} (run.steps), before step {step}; name a step up to {last}"
            findings.error((*_PLACE, "steps", index), message, depends_on=[("run", "steps")])
    on_engines = [name for name, node in pipeline.nodes.items() if getattr(node, "engine", None) is not None]
    for index, name in enumerate(profile.nodes or ()):
        place: Place = (*_PLACE, "nodes", index)
        if name not in pipeline.nodes:
            findings.error(place, f"there is no node `{name}`; {suggest(name, on_engines)}", depends_on=[("nodes",)])
        elif name not in on_engines:
            message = f"`{name}` runs on the host, and only nodes on engines are profiled; {suggest(name, on_engines)}"
            findings.error(place, message, depends_on=[("nodes", name)])
    _check_ranks(pipeline, profile.ranks, findings)
    if profile.tool == "nsys":
        _check_gpus(pipeline, profile.nodes or on_engines, findings)
    for option in ("with_stack", "with_memory"):
        if getattr(profile, option) and profile.tool != "torch":
            message = (
                f"only the torch profiler records that; take it out, or say `tool: torch` in place of {profile.tool}"
            )
            findings.error((*_PLACE, option), message, depends_on=[(*_PLACE, "tool")])


def _check_gpus(pipeline: Pipeline, nodes: Iterable[str], findings: Findings) -> None:
    """Report the first of `nodes` whose engine runs where nsys sees nothing."""
    for node in nodes:
        name = getattr(pipeline.nodes.get(node), "engine", None)
        engine = pipeline.engines.get(name or "")
        if engine is not None and engine.frozen_copy_of is not None:
            engine = pipeline.engines.get(engine.frozen_copy_of)
        group = pipeline.groups.get((engine and engine.group) or "")
        if engine is not None and group is not None and group.is_cpu:
            message = f"nsys looks at GPUs, and engine {name} is on CPU slots; say tool: torch"
            depends: list[Place] = [("nodes", node), ("engines", str(name)), ("groups", str(engine.group))]
            findings.error((*_PLACE, "tool"), message, depends_on=[*depends, (*_PLACE, "nodes")])
            return


def _check_ranks(pipeline: Pipeline, ranks: tuple[int, ...], findings: Findings) -> None:
    homes = {engine.group for engine in pipeline.engines.values()}
    most = max((group.ranks for name, group in pipeline.groups.items() if name in homes), default=0)
    for index, rank in enumerate(ranks):
        if most and rank >= most:
            message = (
                f"no engine has a rank {rank}, for they count from 0 and the largest has {most}; choose a lower one"
            )
            findings.error((*_PLACE, "ranks", index), message, depends_on=[("groups",), ("engines",)])
