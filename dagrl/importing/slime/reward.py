"""slime's ``--rm-*``: the reward."""

from __future__ import annotations

from dagrl.importing.parts import DAPO, is_known
from dagrl.importing.slime.common import function_name
from dagrl.importing.table import Translation, joint

_MATH = ("deepscaler", "math", "dapo", "boxed_deepscaler", "boxed_math", "boxed_dapo")


def _reward(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    kind, own = "--rm-type", "--custom-rm-path"
    if is_known(t.get(own)):
        note = "parameters are response, answer, data_source, extra_info (docs/migration.md)"
        t.write("nodes.reward.fn", function_name(t.get(own)), own, note=note)
        t.imply("`--custom-rm-path` takes its place", kind)
    elif t.get(kind) in _MATH:
        t.write("nodes.reward.fn", "math", kind, note=DAPO.lstrip("; ") if "dapo" in t.get(kind) else "")
    else:
        t.put("nodes.reward.fn", "math")
        t.note(kind, "nodes.reward.fn", "set `fn`: math, code, exact, or your own; math stands in", None)


RULES = (joint(_reward, "--rm-type --custom-rm-path", always=True),)
