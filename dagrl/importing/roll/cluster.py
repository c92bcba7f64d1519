"""ROLL's ``device_mapping``: groups of GPUs."""

from __future__ import annotations

from dagrl.config.errors import counted
from dagrl.importing.parts import put_groups
from dagrl.importing.roll.common import CRITIC, INFER, REFERENCE, TRAIN, devices_of, uses_critic
from dagrl.importing.table import Translation, joint


def _groups(t: Translation) -> None:
    train, infer = devices_of(t, TRAIN), devices_of(t, INFER)
    machine = int(t.number("num_gpus_per_node", 8))

    def sizes(gpus: set[int]) -> tuple[int, int]:
        count = max(1, len(gpus))
        return (1, count) if count <= machine else (-(-count // machine), machine)

    keys = [f"{role}.device_mapping" for role in (TRAIN, INFER)]
    shared = bool(train & infer)
    groups = {"gpus": train | infer} if shared else {"train": train, "rollout": infer}
    put_groups(t, {name: sizes(gpus) for name, gpus in groups.items()})
    for (name, gpus), key in zip(groups.items(), keys, strict=False):
        note = counted(len(gpus), "GPU")
        t.write(f"groups.{name}.gpus_per_node", sizes(gpus)[1], *(keys if shared else (key,)), note=note)
    if shared and train != infer:
        t.refuse("lists that overlap in part have no counterpart: one group holds the GPUs of both", *keys)
    home = next(iter(groups))
    t.put("engines.actor.group", home)
    t.put("engines.generator.group", "gpus" if shared else "rollout")
    if uses_critic(t):
        t.put("engines.critic.group", home)
    for role in (REFERENCE, CRITIC):
        key = f"{role}.device_mapping"
        if devices_of(t, role) == train or (role == CRITIC and not uses_critic(t)):
            t.imply("is on the actor's GPUs", key)
        else:
            t.refuse("is on the actor's GPUs here", key)
    t.imply("machines of a group have the GPUs that it says", "num_gpus_per_node")


RULES = (
    joint(
        _groups,
        "num_gpus_per_node",
        *(f"{role}.device_mapping" for role in (TRAIN, INFER, REFERENCE, CRITIC)),
        always=True,
    ),
)
