"""Router replay: that there are routers, that somebody tells where tokens went, and that all of it is told."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import MegatronEngineSpec, Pipeline, SglangEngineSpec
from dagrl.config.unsupported import Clash
from dagrl.graph.router_replay import SERVER_FIELD, replays, tells_routes
from dagrl.models.sizes import ModelSizes

_UNTOLD_FAMILIES = ("mixtral",)
"""Model types whose routers SGLang 0.5.17 tells nothing of: it does not know their layers' numbers."""
_SERVER_CLASHES = (
    Clash((SERVER_FIELD,), "this turns off to tell of that; take it out", harmless=(None, True)),
    Clash(("pp_size",), "each stage of a server tells of its own layers only; leave it at 1", harmless=(1,)),
    Clash(
        ("enable_hierarchical_cache",),
        "what comes back from the host's cache has lost its routes; take it out",
        harmless=(False,),
    ),
)
"""Fields of ``server`` with which not all routes are told, and why."""


def check_router_replay(pipeline: Pipeline, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report engines that cannot route as the generator did, and generators that cannot tell how they did."""
    for name, engine in pipeline.engines.items():
        if isinstance(engine, MegatronEngineSpec) and engine.router_replay:
            _check_trainer(pipeline, engine, sizes[name], ("engines", name, "router_replay"), findings)
    for name in pipeline.engines:
        if tells_routes(pipeline, name):
            _check_generator(pipeline, name, findings)


def _check_trainer(
    pipeline: Pipeline, engine: MegatronEngineSpec, sizes: ModelSizes, place: Place, findings: Findings
) -> None:
    home = pipeline.engines.get(engine.frozen_copy_of or "")
    if sizes.mixture is False:
        message = "is about experts, and the model has none; take it out"
        findings.error(place, message, depends_on=[("model",)])
    elif sizes.family in _UNTOLD_FAMILIES:
        message = f"SGLang does not tell how a {sizes.family} model routes; take it out"
        findings.error(place, message, depends_on=[("model",)])
    elif engine.head != "lm":
        message = (
            f"routes are those of the policy, and this is a {engine.head} model with weights of its own; take it out"
        )
        findings.error(place, message)
    elif home is not None and not replays(home):
        message = f"its model is that of `{engine.frozen_copy_of}`, which does not; set it there too"
        findings.error(place, message, depends_on=[("engines", str(engine.frozen_copy_of), "router_replay")])
    if engine.transformer.get("moe_router_fusion"):
        message = "the fused router chooses experts by itself; take one of the two out"
        findings.error(place, message, depends_on=[(*place[:-1], "transformer", "moe_router_fusion")])


def _check_generator(pipeline: Pipeline, name: str, findings: Findings) -> None:
    engine = pipeline.engines.get(name)
    trainers = [other for other, spec in pipeline.engines.items() if replays(spec)]
    if engine is None:
        return  # `engines.py` says so.
    place: Place = ("engines", trainers[0], "router_replay")
    if not isinstance(engine, SglangEngineSpec):
        message = f"`{name}`, a {engine.backend} engine, does not tell where it routes tokens; sample with sglang"
        findings.error(place, message, depends_on=[place, ("engines", name)])
        return
    for field, value in engine.server.items():
        for clash in _SERVER_CLASHES:
            if clash.hits(engine, field, value):
                message = f"`{trainers[0]}` routes tokens as they were routed here, but {clash.reason}"
                findings.error(("engines", name, "server", field), message, depends_on=[place])
