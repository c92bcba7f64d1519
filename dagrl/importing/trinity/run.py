"""Trinity-RFT's ``mode``, ``monitor`` and its steps: the run."""

from __future__ import annotations

from dagrl.importing.parts import has_val_data, keep, named, tracked, write_epochs
from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Translation, joint
from dagrl.importing.trinity.common import interval_of


def _mode(t: Translation) -> None:
    if t.get("mode") in ("both", "colocate"):
        t.imply("`dagrl run` is both", "mode")
    elif t.get("mode") == "bench" and has_val_data(t):
        t.write("run.val_only", True, "mode", note="only the newest checkpoint")
    else:
        t.refuse("explorer and trainer are one program: `dagrl run`", "mode")


def _steps(t: Translation) -> None:
    total, epochs, syncs = "buffer.total_steps", "buffer.total_epochs", interval_of(t)
    limit = "trainer.total_steps"
    key = next((key for key in (total, limit) if t.number(key) or isinstance(t.get(key), Unresolved)), None)
    if key:
        steps = t.get(key) if isinstance(t.get(key), Unresolved) else max(1, t.get(key) // syncs)
        t.write("run.steps", steps, key, note=f"/ sync_interval {syncs}" if syncs > 1 else "")
        t.imply("the steps take its place", epochs)
        return
    write_epochs(t, epochs)


def _every(t: Translation) -> None:
    syncs = interval_of(t)
    note = f"/ sync_interval {syncs}" if syncs > 1 else ""
    save = "trainer.save_interval"
    if t.number(save, 0):
        t.write("run.save_every", max(1, t.get(save) // syncs), save, note=note)
    if not has_val_data(t):
        t.imply("there is no validation without eval_tasksets", "explorer.eval_interval", "explorer.eval_on_startup")
        return
    interval, first = "explorer.eval_interval", "explorer.eval_on_startup"
    t.write("run.validate_every", max(1, t.number(interval, 100) // syncs), interval, note=note or "")
    t.write("run.validate_first", t.get(first), first)


RULES = (
    named("name"),
    joint(_mode, "mode"),
    joint(_steps, "buffer.total_steps buffer.total_epochs trainer.total_steps", always=True),
    joint(_every, "trainer.save_interval explorer.eval_interval explorer.eval_on_startup", always=True),
    joint(lambda t: keep(t, "trainer.max_checkpoints_to_keep"), "trainer.max_checkpoints_to_keep", always=True),
    tracked("monitor.monitor_type", project="project", group="group"),
)
