"""``sleep`` of the engines: whether another engine needs the memory."""

from __future__ import annotations

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline
from dagrl.graph.sleeping import neighbours


def check_sleeping(pipeline: Pipeline, findings: Findings) -> None:
    """Warn where no other engine needs the memory."""
    for name, engine in pipeline.engines.items():
        if engine.group not in pipeline.groups:
            continue
        place: Place = ("engines", name)
        others = neighbours(pipeline, name)
        if engine.sleep is True and not others:
            message = f"has no effect, as no other engine works on group `{engine.group}`; take it out"
            findings.warning((*place, "sleep"), message, depends_on=[("groups", str(engine.group)), ("engines",)])
