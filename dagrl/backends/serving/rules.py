"""Rules of servers of all backends: samples must fit into them, and new weights must reach them."""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.serving.section import ServerSpec
from dagrl.config.errors import Place, dotted
from dagrl.config.schema import JudgeNode, LogprobNode, RolloutNode, SamplingSpec


class ServerRules[Spec: ServerSpec]:
    """The servers of one engine, and the place for reports."""

    def __init__(self, check: EngineCheck[Spec]) -> None:
        self.pipeline, self.name, self.findings, self.model = check.pipeline, check.name, check.findings, check.sizes
        self.engine, self.given = check.engine, check.engine.server
        self.place: Place = (*check.place, "server")
        group = self.pipeline.groups.get(self.engine.group or "")
        self.group = group if group is not None and group.ranks else None
        self.replays_routes = self.pipeline.wants_routed_experts(self.name)

    def nodes(self) -> Iterator[tuple[str, RolloutNode | JudgeNode | LogprobNode]]:
        """The nodes that sample on these servers, or have log-probs computed."""
        for name, node in self.pipeline.nodes.items():
            if isinstance(node, RolloutNode | JudgeNode | LogprobNode) and node.engine == self.name:
                yield name, node

    def samplings(self) -> Iterator[tuple[Place, SamplingSpec]]:
        for name, node in self.nodes():
            if isinstance(node, JudgeNode):
                yield ("nodes", name, "sampling"), node.sampling
            elif isinstance(node, RolloutNode):
                yield from self.pipeline.samplings(name).items()

    def longest(self) -> Iterator[tuple[int, str, list[Place]]]:
        """Yield the tokens of each node's longest sample, the options that add up to them, and their places."""
        for name, node in self.nodes():
            if isinstance(node, JudgeNode):
                longest, own = node.max_prompt_tokens + node.sampling.max_new_tokens, f"nodes.{name}"
                what = f"{own}.max_prompt_tokens + {own}.sampling.max_new_tokens"
                yield longest, what, [("nodes", name, "max_prompt_tokens"), ("nodes", name, "sampling")]
                continue
            if isinstance(node, LogprobNode):
                longest = self.pipeline.longest_scored(node) + self.engine.scored_tokens_kept_back
                yield longest, "the longest prompt and response", [("data",), ("nodes",)]
                continue
            by_key = self.pipeline.longest_rows(name, validated=self.pipeline.run.validates)
            section = max(by_key, key=by_key.__getitem__)
            what = f"data.max_prompt_tokens + {dotted(section)}.max_new_tokens"
            yield by_key[section], what, [("data", "max_prompt_tokens"), section]

    def check_room(self, field: str, room: int | None, wanted: int, sample: tuple[int, str, list[Place]]) -> None:
        """Whether `field`, a number of tokens, has room for `wanted`: a sample with the server's additions."""
        longest, what, depends = sample
        if room is not None and room < wanted:
            message = f"{room} tokens cannot hold the longest sample, {longest} ({what})"
            self.error(field, f"{message}; set {field} to {wanted} or more", *depends, code="context-too-short")

    def check_heads(self, field: str, gpus: int) -> None:
        """Whether `gpus` share the heads of attention evenly."""
        heads, keys = self.model.heads, self.model.key_value_heads
        if heads and heads.value % gpus:
            message = f"{gpus} GPUs do not share the model's {heads.name}, {heads.value}, evenly"
            self.error(field, f"{message}; choose a divisor of it", ("model",), code="heads-do-not-divide")
        if keys and keys.value % gpus and gpus % keys.value:
            message = f"{gpus} GPUs do not share the model's {keys.name}, {keys.value}, evenly"
            remedy = "choose a divisor or a multiple of it"
            self.error(field, f"{message}; {remedy}", ("model",), code="heads-do-not-divide")

    def check_sync(self, *sizes: str) -> None:
        """Check that new weights can take the route of ``weight_sync``. `sizes`: fields that give a server its GPUs."""
        engine, place = self.engine, ("engines", self.name, "weight_sync")
        if engine.weights_from is None:
            if "weight_sync" in engine.model_fields_set:
                message = "has no effect, as the engine follows none; remove it, or set `weights_from:`"
                self.findings.warning(place, message)
            return
        trainer = self.pipeline.engines.get(engine.weights_from)
        source = self.pipeline.groups.get(trainer.group or "") if trainer else None
        if self.group is None or source is None or trainer is None:
            return
        route, shared = engine.weight_sync.route, trainer.group == engine.group
        message = ""
        if route == "cuda_ipc" and not shared:
            message = f"is from GPU to the same GPU, and `{engine.weights_from}` is on group `{trainer.group}`"
            message += "; choose broadcast, or name one group for both engines"
        elif route == "broadcast" and shared:
            message = (
                f"is for other GPUs than those of `{engine.weights_from}`, which shares the group; choose cuda_ipc"
            )
        elif route in ("cuda_ipc", "broadcast") and source.is_cpu != self.group.is_cpu:
            message = "one of the two engines has GPUs and the other has not; choose object_store"
        elif (route == "object_store" or (route == "auto" and source.is_cpu)) and engine.nodes_per_server(
            self.group
        ) > 1:
            message = "goes through one machine's memory, and a server spans several machines; choose broadcast"
        if message:
            groups = [("engines", engine_name, "group") for engine_name in (engine.weights_from, self.name)]
            depends = [("groups",), *groups, *((*self.place, size) for size in sizes)]
            self.findings.error((*place, "route"), message, code="route-apart", depends_on=depends)

    def largest(self, *fields: str) -> str:
        """The size to blame: the largest size in the file."""
        return max((field for field in fields if field in self.given), key=lambda each: self.given[each], default="")

    def error(self, field: str, message: str, *depends_on: Place, code: str = "") -> None:
        own: Place = ("extra", "server") if field in self.engine.extra.get("server", {}) else ("server",)
        place = ("engines", self.name, *own, *([field] if field else []))
        # One problem for a field is enough.
        self.findings.error(place, message, code=code, depends_on=[place, *depends_on])
