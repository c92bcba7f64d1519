"""SGLang servers: that they fit their group, the model and each other's options, and that weights can reach them.

`fields.py` has the rules for single fields. SGLang refuses most of these late, once it has loaded a model.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagrl.backends.backend import EngineCheck
from dagrl.backends.families.sizes import ModelSizes
from dagrl.backends.sglang.layout import (
    CPU_CACHE_TOKENS,
    PARALLEL_SIZES,
    ROUTED_EXPERTS,
    TAKEN_OUT_OF_TP,
    gpus_per_server,
    kept_of_cache,
    nodes_per_server,
)
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.errors import Place, dotted, removal
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import GroupSpec, JudgeNode, Pipeline, RolloutNode, SamplingSpec

_REPLAYABLE = {
    ROUTED_EXPERTS: (True, "this turns off reporting routes"),
    "pp_size": (1, "each stage of a server reports its own layers only; leave it at 1"),
    "enable_hierarchical_cache": (False, "the host's cache loses routes"),
}
"""Values that fields must have for servers to report all routes, and why."""

_WITHOUT_WINDOWS = ("mistral",)
"""Models that SGLang computes as if attention reached back to the first token."""


def check_server(check: EngineCheck[SglangEngineSpec]) -> None:
    """Report servers that cannot be placed or built, and weights that cannot reach them."""
    server = _Server(check.pipeline, check.name, check.engine, check.findings)
    if server.can_take_weights():
        server.check_place()
        server.check_split(check.sizes)
    server.check_lengths(check.sizes)
    server.check_sampling()
    server.check_experts(check.sizes)
    server.check_sync()
    server.check_images(check.sizes)
    server.check_routes()


class _Server:
    """The servers of one engine, and where to report."""

    def __init__(self, pipeline: Pipeline, name: str, engine: SglangEngineSpec, findings: Findings) -> None:
        self._pipeline = pipeline
        self._name = name
        self._engine = engine
        self._given = engine.server
        self._group: GroupSpec | None = pipeline.groups.get(engine.group or "")
        self._findings = findings
        self._place: Place = ("engines", name, "server")

    def can_take_weights(self) -> bool:
        """Whether new weights can reach every copy of the model within a server."""
        copies = self._given.get("dp_size", 1)
        if self._engine.weights_from and copies > 1 and not self._given.get("enable_dp_attention"):
            message = "copies within a server cannot take new weights; remove it: each further server is a copy anyway"
            self._error("dp_size", message)
            return False
        return True

    def check_place(self) -> None:
        """Whether whole servers fill the group, and lie well on its machines."""
        group = self._group
        if group is None or not group.ranks:
            return
        each, depends = gpus_per_server(self._given), ("groups", str(self._engine.group))
        largest = self._largest("tp_size", "pp_size", "dp_size")
        per_node = group.gpus_per_node or group.cpus_per_node
        if group.is_cpu and each > 1:
            self._error(largest, "a server on CPU slots takes one of them; leave it at 1", depends)
        elif group.ranks % each:
            message = f"a server takes {each} GPUs, which do not divide the {group.ranks} of group"
            remedy = f"choose sizes whose product divides {group.ranks}, or change the group"
            self._error(largest, f"{message} `{self._engine.group}`; {remedy}", depends)
        elif max(each, per_node) % min(each, per_node):
            message = f"a server of {each} GPUs would lie on parts of machines with {per_node} GPUs"
            self._error(largest, f"{message}; choose a divisor or a multiple of {per_node}", depends)
        elif each > per_node:
            self._check_across_nodes(each // per_node, depends)

    def _check_across_nodes(self, nodes: int, depends: Place) -> None:
        tensor, stages = self._given.get("tp_size", 1), self._given.get("pp_size", 1)
        if self._given.get("dp_size", 1) > 1 and not self._given.get("enable_dp_attention"):
            message = "copies of a model do not span machines; remove it, as further servers are copies anyway"
            self._error("dp_size", message, depends)
        elif max(nodes, stages) % min(nodes, stages) or (nodes > stages and tensor % (nodes // stages)):
            message = f"{stages} stages of {tensor} GPUs do not split evenly over {nodes} machines"
            self._error(self._largest("tp_size", "pp_size"), f"{message}; choose sizes that do", depends)

    def check_split(self, model: ModelSizes) -> None:
        """Whether the GPUs of a server share it out evenly."""
        tensor = self._given.get("tp_size", 1)
        copies = self._given.get("dp_size", 1) if self._given.get("enable_dp_attention") else 1
        if tensor % copies:
            message = f"with DP attention {copies} copies of attention share tp_size = {tensor} GPUs"
            self._error("dp_size", f"{message}; choose a divisor of {tensor}")
            return
        if self._given.get("enable_dp_attention") and copies == 1:
            self._error("enable_dp_attention", removal("has no copies to spread", "set dp_size above 1"))
        for field in TAKEN_OUT_OF_TP:
            if tensor % self._given.get(field, 1):
                message = f"is taken out of tp_size = {tensor}, which it does not divide; choose a divisor of {tensor}"
                self._error(field, message, (*self._place, "tp_size"))
                return
        context = self._given.get("attn_cp_size", 1)
        if (tensor // copies) % context:
            message = (
                f"{copies} copies of attention leave {tensor // copies} GPUs each, which {context} does not divide"
            )
            self._error("attn_cp_size", f"{message}; choose a divisor", (*self._place, "dp_size"))
            return
        self._check_expert_split(tensor, context)
        attention = tensor // copies // context
        if model.heads and model.heads.value % attention:
            message = f"{attention} GPUs do not share the model's {model.heads.name}, {model.heads.value}, evenly"
            self._error("tp_size", f"{message}; choose a divisor of it", ("model",))
        keys = model.key_value_heads
        if keys and keys.value % attention and attention % keys.value:
            message = f"{attention} GPUs do not share the model's {keys.name}, {keys.value}, evenly"
            self._error("tp_size", f"{message}; choose a divisor or a multiple of it", ("model",))
        if model.experts and model.experts.value % self._given.get("ep_size", 1):
            message = f"does not divide the model's {model.experts.name}, {model.experts.value}"
            self._error("ep_size", f"{message}; choose a divisor of it", ("model",))
        if model.layers and self._given.get("pp_size", 1) > model.layers.value:
            message = f"the model has only {model.layers.value} layers; choose at most so many stages"
            self._error("pp_size", message, ("model",))

    def _check_expert_split(self, tensor: int, context: int) -> None:
        """SGLang's rules for copies of all experts, each shared out over a part of a server's GPUs."""
        copies, experts = self._given.get("moe_dp_size", 1), self._given.get("ep_size", 1)
        if copies == 1:
            return
        message = ""
        if self._given.get("pp_size", 1) > 1:
            message = "does not go with pipeline stages; remove one of the two"
        elif experts > 1 and experts * copies != tensor:
            message = f"{copies} copies of experts over {experts} GPUs each (ep_size) are not tp_size = {tensor}"
            message += f"; choose sizes whose product is {tensor}, or remove one of the two"
        elif context != copies:
            message = removal(f"SGLang copies experts {copies} times only where attn_cp_size is {copies} too", "set it")
        if message:
            self._error("moe_dp_size", message, *((*self._place, field) for field in PARALLEL_SIZES))

    def check_lengths(self, model: ModelSizes) -> None:
        """Whether the longest sample fits into the server's context and its cache."""
        context, cache = self._given.get("context_length"), self._given.get("max_total_tokens")
        if cache is None and self._group is not None and self._group.is_cpu:
            cache = CPU_CACHE_TOKENS
        page = self._engine.page_size
        for longest, what, depends in self._longest():
            if model.family in _WITHOUT_WINDOWS and model.window and longest > model.window.value:
                message = (
                    f"SGLang's {model.family} has no sliding window, and that of the model, {model.window.value}, "
                )
                message += f"is shorter than the longest sample, {longest} ({what}); use another backend"
                place = ("engines", self._name, "backend")
                self._findings.error(place, message, code="no-window", depends_on=[("model",), *depends])
            for field, room, wanted in (
                ("context_length", context, longest),
                ("max_total_tokens", cache, -(-(longest + kept_of_cache(page)) // page) * page),
            ):
                if room is not None and room < wanted:
                    message = f"{room} tokens cannot hold the longest sample, {longest} ({what})"
                    self._error(field, f"{message}; set {field} to {wanted} or more", *depends)
        if context is not None and model.positions and context > model.positions.value:
            message = f"is more than the model's {model.positions.name}, {model.positions.value}"
            self._error("context_length", f"{message}; choose at most that", ("model",))

    def check_sampling(self) -> None:
        """Whether SGLang can draw tokens, and stop responses, as the file says."""
        repeatable = "enable_deterministic_inference"
        for name, node in self._nodes():
            judges = isinstance(node, JudgeNode)
            alone: dict[Place, SamplingSpec] = {("nodes", name, "sampling"): node.sampling}
            for section, sampling in (alone if judges else self._pipeline.samplings(name)).items():
                if sampling.ignore_eos and sampling.stop_token_ids:
                    message = "SGLang stops at no token at all where it ignores the end of a sequence, and "
                    message += "stop_token_ids names some; remove one of the two"
                    self._findings.error((*section, "ignore_eos"), message)
                if sampling.min_p and self._given.get(repeatable):
                    message = f"SGLang dies of it with `{repeatable}`, which `{self._name}` has; remove one of the two"
                    depends: list[Place] = [(*self._place, repeatable)]
                    self._findings.error((*section, "min_p"), message, depends_on=depends)

    def check_experts(self, model: ModelSizes) -> None:
        """Whether there are experts where an option is about them, and in all layers where SGLang takes them for it."""
        if not model.serves_dense_layers and model.dense_width is not None:
            message = (
                f"SGLang puts experts into every layer of a {model.family}, and some layers of this one have none; "
                "take a model without mlp_only_layers and with decoder_sparse_step 1, or sample with hf"
            )
            self._findings.error(("engines", self._name, "backend"), message, depends_on=[("model",)])
        if model.mixture is False and self._given.get(ROUTED_EXPERTS):
            self._error(ROUTED_EXPERTS, removal("is about experts, and the model has none"), ("model",))
        chunk = self._given.get("chunked_prefill_size")
        if chunk is not None and chunk <= 0 and self._tells_routes():
            message = removal("without chunks, SGLang has no room for the routes of a long prompt, and would die")
            self._error("chunked_prefill_size", message)

    def check_routes(self) -> None:
        """Whether all routes are reported, where a trainer replays them."""
        if not self._pipeline.wants_routed_experts(self._name):
            return
        trainer = next(name for name, engine in self._pipeline.engines.items() if engine.replays_routes)
        for field, (needed, why) in _REPLAYABLE.items():
            if self._given.get(field, needed) != needed:
                message = removal(f"`{trainer}` routes tokens as they were routed here, but {why}")
                self._error(field, message, ("engines", trainer, "router_replay"))

    def _tells_routes(self) -> bool:
        return bool(self._given.get(ROUTED_EXPERTS)) or self._pipeline.wants_routed_experts(self._name)

    def check_images(self, model: ModelSizes) -> None:
        """Whether the servers see images as the model does."""
        if self._pipeline.data.image_key is None:
            return
        place = ("engines", self._name, "backend")
        if self._group is not None and self._group.is_cpu:
            message = "SGLang's vision towers compute other values on CPUs; use GPUs, or backend: hf"
            self._findings.error(place, message, code="images-on-cpus", depends_on=[("data",), ("groups",)])
        elif model.added_layers:
            message = f"SGLang has not shown {model.family} images as transformers does; use backend: vllm or hf"
            self._findings.error(place, message, code="images-untested", depends_on=[("data",), ("model",)])

    def check_sync(self) -> None:
        """Whether new weights can take the way that is asked for."""
        engine, place = self._engine, ("engines", self._name, "weight_sync")
        if engine.weights_from is None:
            if "weight_sync" in engine.model_fields_set:
                message = "has no effect, as the engine follows none; remove it, or say `weights_from:`"
                self._findings.warning(place, message)
            return
        trainer = self._pipeline.engines.get(engine.weights_from)
        source = self._pipeline.groups.get(trainer.group or "") if trainer else None
        if self._group is None or source is None or trainer is None:
            return
        route, shared = engine.weight_sync.route, trainer.group == engine.group
        depends: list[Place] = [
            ("groups",),
            ("engines", engine.weights_from, "group"),
            ("engines", self._name, "group"),
        ]
        depends += [(*self._place, size) for size in PARALLEL_SIZES]
        message = ""
        if route == "cuda_ipc" and not shared:
            message = f"is from GPU to the same GPU, and `{engine.weights_from}` is on group `{trainer.group}`"
            message += "; choose broadcast, or name one group for both engines"
        elif route == "broadcast" and shared:
            message = f"is to other GPUs than those of `{engine.weights_from}`, which shares the group; choose cuda_ipc"
        elif route in ("cuda_ipc", "broadcast") and source.is_cpu != self._group.is_cpu:
            message = "one of the two engines has GPUs and the other has not; choose object_store"
        elif (route == "object_store" or (route == "auto" and source.is_cpu)) and self._spans_machines():
            message = "goes through one machine's memory, and a server spans several machines; choose broadcast"
        if message:
            self._findings.error((*place, "route"), message, depends_on=depends)

    def _spans_machines(self) -> bool:
        group = self._group
        return group is not None and group.ranks > 0 and nodes_per_server(self._given, group) > 1

    def _nodes(self) -> list[tuple[str, RolloutNode | JudgeNode]]:
        """The nodes that sample on these servers."""
        nodes = self._pipeline.nodes.items()
        return [
            (name, node)
            for name, node in nodes
            if isinstance(node, RolloutNode | JudgeNode) and node.engine == self._name
        ]

    def _longest(self) -> Iterator[tuple[int, str, list[Place]]]:
        """The tokens that each node's longest sample has, what they consist of, and where that is said."""
        for name, node in self._nodes():
            if isinstance(node, JudgeNode):
                longest, own = node.max_prompt_tokens + node.sampling.max_new_tokens, f"nodes.{name}"
                what = f"{own}.max_prompt_tokens + {own}.sampling.max_new_tokens"
                yield longest, what, [("nodes", name, "max_prompt_tokens"), ("nodes", name, "sampling")]
                continue
            by_key = self._pipeline.longest_rows(name, validated=self._pipeline.run.validates)
            section = max(by_key, key=by_key.__getitem__)
            what = f"data.max_prompt_tokens + {dotted(section)}.max_new_tokens"
            yield by_key[section], what, [("data", "max_prompt_tokens"), section]

    def _largest(self, *fields: str) -> str:
        """The size to blame: the largest that the file says."""
        return max((field for field in fields if field in self._given), key=lambda each: self._given[each], default="")

    def _error(self, field: str, message: str, *depends_on: Place) -> None:
        extra = field in self._engine.extra.get("server", {})
        own: Place = ("extra", "server") if extra else ("server",)
        place = ("engines", self._name, *own, *([field] if field else []))
        # One mistake in a field is enough.
        self._findings.error(place, message, depends_on=[place, *depends_on])
