"""``sleep`` of the engines: that there is somebody to make room for, and that the engine can leave its memory."""

from __future__ import annotations

from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import MegatronEngineSpec, Pipeline
from dagrl.graph.sleeping import neighbours, sleeps


def check_sleeping(pipeline: Pipeline, findings: Findings) -> None:
    """Report engines that cannot sleep and are to; warn where sleeping would be of no use."""
    for name, engine in pipeline.engines.items():
        if engine.group not in pipeline.groups:
            continue
        place: Place = ("engines", name)
        others = neighbours(pipeline, name)
        if engine.sleep is True and not others:
            message = f"has no effect, as no other engine works on group `{engine.group}`; take it out"
            findings.warning((*place, "sleep"), message, depends_on=[("groups", str(engine.group)), ("engines",)])
        if isinstance(engine, MegatronEngineSpec) and engine.ddp.get("nccl_ub"):
            if sleeps(pipeline, name):
                message = f"registers device memory with NCCL, which cannot be left while {listed(others)} works there"
                message += "; take it out, or say `sleep: false`"
                findings.error((*place, "ddp", "nccl_ub"), message, depends_on=[(*place, "sleep"), ("groups",)])
            elif any(engine.offload.model_dump().values()):
                message = "registers device memory with NCCL, which cannot be left; take it out, or take `offload` out"
                findings.error((*place, "ddp", "nccl_ub"), message, depends_on=[(*place, "offload")])
