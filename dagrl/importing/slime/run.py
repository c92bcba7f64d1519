"""slime's run: its name, steps, checkpoints and trackers."""

from __future__ import annotations

from pathlib import PurePosixPath

from dagrl.importing.parts import is_known, name_of, steps_of_epochs, trackers
from dagrl.importing.table import Translation, joint, to


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
    key = "--num-rollout"
    if t.number(key):
        t.write("run.steps", t.get(key), key)
        t.imply("`--num-rollout` takes its place", "--num-epoch")
    else:
        steps_of_epochs(t, "--num-epoch")


def _track(t: Translation) -> None:
    used = {"wandb": "--use-wandb", "tensorboard": "--use-tensorboard", "mlflow": "--use-mlflow"}
    for name, key in used.items():
        if t.flag(key):
            trackers(t, [*t.tree.get("track", ["console"]), name], key)


def _keep(t: Translation) -> None:
    if "run.save_every" in t.tree:
        t.write("run.keep", "all", "--save-interval", note="there, all checkpoints are kept")


STEPS = (joint(_steps, "--num-rollout", "--num-epoch", targets=("run.steps",), always=True),)
RULES = (
    joint(_name, "--wandb-group", "--tb-experiment-name", targets=("name",), always=True),
    joint(_track, "--use-wandb", "--use-tensorboard", "--use-mlflow", targets=("track",)),
    to("--save-interval", "run.save_every"),
    joint(_keep, targets=("run.keep",), always=True),
    to("--async-save", "run.async_save"),
    to("--rollout-seed", "run.seed"),
)
