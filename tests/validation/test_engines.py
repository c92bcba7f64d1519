import pytest

from dagrl.validation import check_file

ACTOR = "    group: train\n"
CASES = {
    "no such group": (ACTOR, "    group: trian #!\n", "engines.actor.group", "unknown-group"),
    "GPUs and CPUs": (
        "  train: {cpus_per_node: 2}",
        "  train: {cpus_per_node: 2, gpus_per_node: 8} #!",
        "groups.train",
        "group-without-slots",
    ),
    "name of the workers without an engine": (
        "  generator: {",
        "  host: {backend: hf, group: rollout} #!\n  generator: {",
        "engines.host",
        "reserved-name",
    ),
    "a GPU that nobody makes": (
        "  train: {cpus_per_node: 2}",
        "  train:\n    gpus_per_node: 2\n    gpu: H200s #!",
        "groups.train.gpu",
        "unknown-gpu",
    ),
    "neither": ("  train: {cpus_per_node: 2}", "  train: {nodes: 2} #!", "groups.train", "group-without-slots"),
    "more machines at least than at most": (
        "  rollout: {cpus_per_node: 1}",
        "  rollout: {cpus_per_node: 1, nodes: 2, min_nodes: 3} #!",
        "groups.rollout.min_nodes",
        "min-above-most",
    ),
    "an elastic trainer": (
        "  train: {cpus_per_node: 2}",
        "  train: {cpus_per_node: 2, nodes: 2, min_nodes: 1} #!",
        "groups.train.min_nodes",
        "not-elastic",
    ),
    "no place": (
        "  actor:\n",
        "  critic: {backend: megatron} #!\n  actor:\n",
        "engines.critic",
        "engine-without-group",
    ),
    "group and shares": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor, group: train} #!",
        "engines.reference.frozen_copy_of",
        "two-groups",
    ),
    "shares nobody": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: acter} #!",
        "engines.reference.frozen_copy_of",
        "unknown-engine",
    ),
    "shares itself": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: reference} #!",
        "engines.reference.frozen_copy_of",
        "no-frozen-copy",
    ),
    "shares a generator": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: generator} #!",
        "engines.reference.frozen_copy_of",
        "no-frozen-copy",
    ),
    "shares a sharer": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor}\n  third: {backend: megatron, frozen_copy_of: reference} #!",
        "engines.third.frozen_copy_of",
        "no-frozen-copy",
    ),
    "shares with a layout of its own": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor, parallel: {tensor_model_parallel_size: 2}} #!",
        "engines.reference.parallel",
        "copy-differs",
    ),
    "an average of nothing": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor}\n  third: {backend: megatron, group: train, moving_average: 0.1} #!",
        "engines.third.moving_average",
        "average-of-nothing",
    ),
    "an average of what is not trained": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor}\n  other: {backend: megatron, group: train}\n"
        "  third: {backend: megatron, frozen_copy_of: other, moving_average: 0.1} #!",
        "engines.third.moving_average",
        "average-of-nothing",
    ),
    "two averages": (
        "frozen_copy_of: actor}",
        "frozen_copy_of: actor, moving_average: 0.2}\n"
        "  third: {backend: megatron, frozen_copy_of: actor, moving_average: 0.1} #!",
        "engines.third.moving_average",
        "several-averages",
    ),
    "follows nobody": (
        "weights_from: actor}",
        "weights_from: acto} #!",
        "engines.generator.weights_from",
        "unknown-engine",
    ),
    "follows a frozen engine": (
        "weights_from: actor}",
        "weights_from: reference} #!",
        "engines.generator.weights_from",
        "untrained-source",
    ),
    "follows a generator": (
        "weights_from: actor}",
        "weights_from: generator} #!",
        "engines.generator.weights_from",
        "untrained-source",
    ),
    "no such engine": (
        "{op: update, engine: actor, loss: {kl_coef: 0.01}}",
        "{op: update, engine: acter, loss: {kl_coef: 0.01}} #!",
        "nodes.update.engine",
        "unknown-engine",
    ),
    "cannot generate": (
        "engine: generator, n: 4, sampling: {max_new_tokens: 8}}",
        "engine: actor, n: 4, sampling: {max_new_tokens: 8}} #!",
        "nodes.rollout.engine",
        "wrong-backend",
    ),
    "cannot score": (
        "engine: reference, write: ref_logprob}",
        "engine: generator, write: ref_logprob} #!",
        "nodes.ref.engine",
        "wrong-backend",
    ),
    "trained twice": (
        "loss: {kl_coef: 0.01}}",
        "loss: {kl_coef: 0.01}}\n  again: {op: update, engine: actor} #!",
        "nodes.again.engine",
        "trained-twice",
    ),
    "trains a frozen engine": (
        "loss: {kl_coef: 0.01}}",
        "loss: {kl_coef: 0.01}}\n  again: {op: update, engine: reference} #!",
        "nodes.again.engine",
        "trains-frozen-copy",
    ),
    "no learning rate": (
        "    optimizer: {lr: 1e-3}",
        "    optimizer: {} #!",
        "engines.actor.optimizer",
        "no learning rate",
    ),
    "learning rate of zero": (
        "{lr: 1e-3}",
        "{lr: 0} #!",
        "engines.actor.optimizer.lr",
        "invalid-value",
    ),
    "floor above peak": (
        ACTOR,
        ACTOR + "    lr_schedule: {min_lr: 0.01} #!\n",
        "engines.actor.lr_schedule.min_lr",
        "the floor 0.01 is above the peak, optimizer.lr = 0.001; lower it",
    ),
    "warm-up too long": (
        ACTOR,
        ACTOR + "    lr_schedule: {lr_warmup_steps: 10, lr_decay_steps: 10} #!\n",
        "engines.actor.lr_schedule.lr_warmup_steps",
        "the warm-up takes 10 steps, and the decay ends at lr_decay_steps = 10; shorten it, or raise lr_decay_steps",
    ),
    "warm-up too long by its share": (
        ACTOR,
        ACTOR + "    lr_schedule: {lr_warmup_ratio: 0.5, lr_decay_steps: 1} #!\n",
        "engines.actor.lr_schedule.lr_warmup_ratio",
        "the decay ends at lr_decay_steps = 1",
    ),
    "warm-up given twice": (
        ACTOR,
        ACTOR + "    lr_schedule: {lr_warmup_ratio: 0.1, lr_warmup_steps: 1} #!\n",
        "engines.actor.lr_schedule.lr_warmup_ratio",
        "lr_warmup_steps",
    ),
    "warm-up longer than the run": (
        ACTOR,
        ACTOR + "    lr_schedule: {lr_warmup_ratio: 1.5} #!\n",
        "engines.actor.lr_schedule.lr_warmup_ratio",
        "invalid-value",
    ),
}


@pytest.mark.parametrize(("old", "new", "place", "fragment"), CASES.values(), ids=CASES.keys())
def test_errors_of_engines_are_reported(project, old, new, place, fragment):
    project.assert_problem(project.pipeline((old, new)), place, fragment)


def test_a_layout_that_is_the_owners_may_be_repeated(project):
    layout = "{tensor_model_parallel_size: 2}"
    check_file(project.folder / "p.yaml", [f"engines.actor.parallel={layout}", f"engines.reference.parallel={layout}"])


def test_an_unused_declaration_is_a_warning(project):
    path = project.pipeline(
        ("  rollout: {cpus_per_node: 1}", "  rollout: {cpus_per_node: 1}\n  spare: {cpus_per_node: 1}"),
        ("weights_from: actor}", "}\n  idle: {backend: hf, group: rollout}"),
    )
    assert [(warning.place, warning.code) for warning in check_file(path).warnings] == [
        ("groups.spare", "unused-group"),
        ("engines.generator", "stale-generator"),
        ("engines.idle", "unused-engine"),
    ]
