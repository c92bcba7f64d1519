"""Checks of SGLang servers: group, model and options must fit each other, and weights must reach the servers.

`fields.py` has the rules for single fields. SGLang refuses most of these late, once it has loaded a model.
"""

from __future__ import annotations

from dagrl.backends.backend import EngineCheck
from dagrl.backends.serving.rules import ServerRules
from dagrl.backends.serving.section import ROUTED_EXPERTS
from dagrl.backends.sglang.layout import CPU_CACHE_TOKENS, PARALLEL_SIZES, TAKEN_OUT_OF_TP, kept_of_cache
from dagrl.backends.sglang.section import SglangEngineSpec
from dagrl.config.errors import Place, removal

_REPLAYABLE = {
    ROUTED_EXPERTS: (True, "this turns off reporting routes"),
    "pp_size": (1, "each stage of a server reports its own layers only"),
    "enable_hierarchical_cache": (False, "the host's cache loses routes"),
}
"""Fields -> required values for servers to report all routes, and the reason."""

_WITHOUT_WINDOWS = ("mistral",)
"""Models that SGLang computes as if attention reached back to the first token."""


def check_server(check: EngineCheck[SglangEngineSpec]) -> None:
    """Report servers that cannot be placed or built, and weights that cannot reach them."""
    rules = _Rules(check)
    if rules.can_take_weights():
        rules.check_place()
        rules.check_split()
    rules.check_lengths()
    rules.check_sampling()
    rules.check_experts()
    rules.check_sync(*PARALLEL_SIZES)
    rules.check_images()
    rules.check_layer_kinds()
    rules.check_routes()


class _Rules(ServerRules[SglangEngineSpec]):
    def can_take_weights(self) -> bool:
        """Whether new weights can reach every copy of the model within a server."""
        copies = self.given.get("dp_size", 1)
        if self.engine.weights_from and copies > 1 and not self.given.get("enable_dp_attention"):
            message = "copies within a server cannot take new weights; remove it: each further server is a copy anyway"
            self.error("dp_size", message)
            return False
        return True

    def check_place(self) -> None:
        """Whether whole servers fill the group, and divide its machines."""
        group = self.group
        if group is None:
            return
        size, depends = self.engine.gpus_per_server, ("groups", str(self.engine.group))
        largest = self.largest("tp_size", "pp_size", "dp_size")
        per_node = group.slots_per_node
        if group.is_cpu and size > 1:
            self.error(largest, "a server on CPU slots takes one of them; leave it at 1", depends)
        elif group.ranks % size:
            message = f"a server takes {size} GPUs, which do not divide the {group.ranks} of group"
            remedy = f"choose sizes whose product divides {group.ranks}, or change the group"
            self.error(largest, f"{message} `{self.engine.group}`; {remedy}", depends)
        elif max(size, per_node) % min(size, per_node):
            message = f"a server of {size} GPUs would lie on parts of machines with {per_node} GPUs"
            self.error(largest, f"{message}; choose a divisor or a multiple of {per_node}", depends)
        elif size > per_node:
            self._check_across_nodes(size // per_node, depends)

    def _check_across_nodes(self, nodes: int, depends: Place) -> None:
        tensor, stages = self.given.get("tp_size", 1), self.given.get("pp_size", 1)
        if self.given.get("dp_size", 1) > 1 and not self.given.get("enable_dp_attention"):
            message = "copies of a model do not span machines; remove it, as further servers are copies anyway"
            self.error("dp_size", message, depends)
        elif max(nodes, stages) % min(nodes, stages) or (nodes > stages and tensor % (nodes // stages)):
            message = f"{stages} stages of {tensor} GPUs do not split evenly over {nodes} machines"
            self.error(self.largest("tp_size", "pp_size"), f"{message}; choose sizes that do", depends)

    def check_split(self) -> None:
        """Whether the GPUs of a server divide it evenly."""
        tensor = self.given.get("tp_size", 1)
        copies = self.given.get("dp_size", 1) if self.given.get("enable_dp_attention") else 1
        if tensor % copies:
            message = f"with DP attention {copies} copies of attention share tp_size = {tensor} GPUs"
            self.error("dp_size", f"{message}; choose a divisor of {tensor}")
            return
        if self.given.get("enable_dp_attention") and copies == 1:
            self.error("enable_dp_attention", removal("has no copies to spread", "set dp_size above 1"))
        for field in TAKEN_OUT_OF_TP:
            if tensor % self.given.get(field, 1):
                message = (
                    f"is a subdivision of tp_size = {tensor}, but does not divide it; choose a divisor of {tensor}"
                )
                self.error(field, message, (*self.place, "tp_size"))
                return
        context = self.given.get("attn_cp_size", 1)
        if (tensor // copies) % context:
            message = f"does not divide the {tensor // copies} GPUs of each of {copies} copies of attention"
            self.error("attn_cp_size", f"{message}; choose a divisor", (*self.place, "dp_size"))
            return
        self._check_expert_split(tensor, context)
        attention = tensor // copies // context
        self.check_heads("tp_size", attention)
        model = self.model
        if model.experts and model.experts.value % self.given.get("ep_size", 1):
            message = f"does not divide the model's {model.experts.name}, {model.experts.value}"
            self.error("ep_size", f"{message}; choose a divisor of it", ("model",))
        if model.layers and self.given.get("pp_size", 1) > model.layers.value:
            message = f"the model has only {model.layers.value} layers; choose at most that many stages"
            self.error("pp_size", message, ("model",))

    def _check_expert_split(self, tensor: int, context: int) -> None:
        """SGLang's rules for copies of all experts, each divided over a part of a server's GPUs."""
        copies, experts = self.given.get("moe_dp_size", 1), self.given.get("ep_size", 1)
        if copies == 1:
            return
        message = ""
        if self.given.get("pp_size", 1) > 1:
            message = "does not go with pipeline stages; remove one of the two"
        elif experts > 1 and experts * copies != tensor:
            message = f"{copies} copies of experts over {experts} GPUs each (ep_size) are not tp_size = {tensor}"
            message += f"; choose sizes whose product is {tensor}, or remove one of the two"
        elif context != copies:
            message = removal(f"{copies} copies of experts need attn_cp_size: {copies}", "set that")
        if message:
            self.error("moe_dp_size", message, *((*self.place, field) for field in PARALLEL_SIZES))

    def check_lengths(self) -> None:
        """Whether the longest sample fits into the server's context and its cache."""
        model = self.model
        context, cache = self.given.get("context_length"), self.given.get("max_total_tokens")
        if cache is None and self.group is not None and self.group.is_cpu:
            cache = CPU_CACHE_TOKENS
        page = self.engine.page_size
        for longest, what, depends in self.longest():
            if model.family in _WITHOUT_WINDOWS and model.window and longest > model.window.value:
                message = f"SGLang ignores the model's sliding window of {model.window.value} tokens, which is shorter "
                message += f"than the longest sample, {longest} ({what}); use another backend"
                place = ("engines", self.name, "backend")
                self.findings.error(place, message, code="no-window", depends_on=[("model",), *depends])
            sample = longest, what, depends
            self.check_room("context_length", context, longest, sample)
            self.check_room("max_total_tokens", cache, -(-(longest + kept_of_cache(page)) // page) * page, sample)
        if context is not None and model.positions and context > model.positions.value:
            message = f"is more than the model's {model.positions.name}, {model.positions.value}"
            self.error("context_length", f"{message}; choose at most that", ("model",))

    def check_sampling(self) -> None:
        """Whether SGLang can draw tokens, and stop responses, as the file says."""
        repeatable = "enable_deterministic_inference"
        for section, sampling in self.samplings():
            if sampling.ignore_eos and sampling.stop_token_ids:
                message = "with it SGLang ignores stop_token_ids, too; remove one of the two"
                self.findings.error((*section, "ignore_eos"), message)
            if sampling.min_p and self.given.get(repeatable):
                message = f"SGLang crashes with `{repeatable}`, which `{self.name}` has; remove one of the two"
                self.findings.error((*section, "min_p"), message, depends_on=[(*self.place, repeatable)])

    def check_experts(self) -> None:
        """Whether the model has experts where an option or SGLang's implementation needs them."""
        model = self.model
        if not model.traits.serves_dense_layers and model.dense_width is not None:
            message = (
                f"SGLang puts experts into every layer of a {model.family}, but some layers of this model have none; "
                "take a model without mlp_only_layers and with decoder_sparse_step 1, or sample with hf"
            )
            self.findings.error(("engines", self.name, "backend"), message, depends_on=[("model",)])
        if model.mixture is False and self.given.get(ROUTED_EXPERTS):
            self.error(ROUTED_EXPERTS, removal("is an option for experts, but the model has no experts"), ("model",))
        chunk = self.given.get("chunked_prefill_size")
        if chunk is not None and chunk <= 0 and (self.given.get(ROUTED_EXPERTS) or self.replays_routes):
            message = removal("SGLang crashes when it reports the routes of a long prompt that is not chunked")
            self.error("chunked_prefill_size", message)

    def check_routes(self) -> None:
        """Whether all routes are reported, if a trainer replays them."""
        if not self.replays_routes:
            return
        trainer = next(name for name, engine in self.pipeline.engines.items() if engine.replays_routes)
        for field, (needed, why) in _REPLAYABLE.items():
            if self.given.get(field, needed) != needed:
                message = removal(f"`{trainer}` routes tokens as they were routed here, but {why}")
                self.error(field, message, ("engines", trainer, "router_replay"))

    def check_images(self) -> None:
        """Whether the servers see images as the model does."""
        if self.pipeline.data.image_key is None:
            return
        place = ("engines", self.name, "backend")
        if self.group is not None and self.group.is_cpu:
            message = "SGLang's vision towers compute other values on CPUs; use GPUs, or backend: hf"
            self.findings.error(place, message, code="images-on-cpus", depends_on=[("data",), ("groups",)])
        elif self.model.added_layers:
            message = f"images of {self.model.family} are not tested with SGLang; use backend: vllm or hf"
            self.findings.error(place, message, code="images-untested", depends_on=[("data",), ("model",)])

    def check_layer_kinds(self) -> None:
        """Check that full attention is in every nth layer, as SGLang assumes of models with gated delta nets."""
        linear = self.model.linear_layers
        every = 1 + (linear.index(False) if False in linear else len(linear))
        if any(linear) and linear != tuple((layer + 1) % every != 0 for layer in range(len(linear))):
            place = ("engines", self.name, "backend")
            message = "SGLang has full attention in every nth layer only, unlike this model; use backend: hf"
            self.findings.error(place, message, code="layers-unlike-sglang", depends_on=[("model",)])
