"""slime's run: its name, steps, checkpoints and trackers."""

from __future__ import annotations

from pathlib import PurePosixPath

from dagrl.importing.parts import is_known, name_of, trackers, write_epochs
from dagrl.importing.settings import Unresolved
from dagrl.importing.slime.common import validates
from dagrl.importing.table import Translation, joint, to

_WANDB = {"project": "--wandb-project", "group": "--wandb-group", "entity": "--wandb-team"}


def _name(t: Translation) -> None:
    keys = ("--wandb-group", "--tb-experiment-name", "--save", "--hf-checkpoint")
    key = next((key for key in keys if is_known(t.get(key)) and t.get(key) is not True), keys[-1])
    value = PurePosixPath(str(t.get(key))).name if key in keys[2:] else t.get(key)
    if key in keys[:2]:
        t.write("name", name_of(value), key)
    else:
        t.put("name", name_of(value))
        t.origins.pop("name", None)


def _steps(t: Translation) -> None:
    key, epochs = "--num-rollout", "--num-epoch"
    if t.number(key) is None and not isinstance(t.get(key), Unresolved):
        write_epochs(t, epochs)
        return
    t.write("run.steps", t.get(key), key)
    if t.get(key) == 0 and validates(t):
        t.write("run.val_only", True, key, note="slime only validates then")
    elif t.get(key) == 0:
        t.note(key, "run.steps", "nothing is trained, and there is no validation", 0)
    t.imply("`--num-rollout` takes its place", epochs)


def _track(t: Translation) -> None:
    used = {"wandb": "--use-wandb", "tensorboard": "--use-tensorboard", "mlflow": "--use-mlflow"}
    names = [name for name, key in used.items() if t.flag(key)]
    if names:
        settings = _WANDB if "wandb" in names else {}
        trackers(t, names, [used[name] for name in names], settings)
    t.imply("has no effect without `--use-wandb`", *_WANDB.values())


def _keep(t: Translation) -> None:
    if "run.save_every" in t.tree:
        t.write("run.keep", "all", "--save-interval", note="there, all checkpoints are kept")


STEPS = (joint(_steps, "--num-rollout --num-epoch", always=True),)
RULES = (
    joint(_name, "--wandb-group --tb-experiment-name", always=True),
    joint(_track, "--use-wandb --use-tensorboard --use-mlflow", *_WANDB.values()),
    to("--save-interval", "run.save_every"),
    joint(_keep, always=True),
    to("--async-save", "run.async_save"),
    to("--rollout-seed", "run.seed"),
)
