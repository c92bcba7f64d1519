"""slime's groups of GPUs."""

from __future__ import annotations

from dagrl.importing.parts import first_group
from dagrl.importing.slime.common import uses_critic
from dagrl.importing.table import Translation, joint


def _groups(t: Translation) -> None:
    nodes, gpus, rollout = "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus"
    shared = t.flag("--colocate")
    home = "gpus" if shared else "train"
    first_group(t, home, nodes, gpus)
    t.put("engines.generator.group", home if shared else "rollout")
    if shared:
        t.imply("one group for both engines", "--colocate")
        t.imply("generators share the trainer's GPUs", rollout)
    else:
        size, machine = t.number(rollout, 8), t.number("--num-gpus-per-node", 8)
        if size > machine:
            t.put("groups.rollout.nodes", -(-size // machine))
        t.write("groups.rollout.gpus_per_node", min(size, machine), rollout)
    t.imply("machines of a group have the GPUs that it says", "--num-gpus-per-node")
    if uses_critic(t):
        t.put("engines.critic.group", home)
    keys = ("--critic-num-nodes", "--critic-num-gpus-per-node")
    t.refuse("the critic shares the actor's group; `engines.critic.group` names another", *keys)


RULES = (
    joint(
        _groups,
        "--actor-num-nodes --actor-num-gpus-per-node --critic-num-nodes --critic-num-gpus-per-node "
        "--rollout-num-gpus --num-gpus-per-node --colocate",
        always=True,
    ),
)
