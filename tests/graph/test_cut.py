import pytest

from dagrl.config.loading.loader import load_pipeline
from dagrl.graph.cut import Cut, PartError, cut
from dagrl.graph.dag import Wire
from dagrl.graph.inference import build_graph

EXPLORE, TRAIN = ("rollout", "reward"), ("advantage", "update")
TWO = "nodes.second={op: reward, fn: math, write: second}"
CRITIC = ("engines.critic={backend: megatron, group: train, head: value, optimizer: {lr: 1e-3}}",
          "nodes.values={op: values, engine: critic}", "nodes.critic={op: critic, engine: critic}",
          "nodes.advantage={op: advantage, estimator: gae}")  # fmt: skip


def part_of(project, only, *overrides) -> Cut:
    loaded = load_pipeline(project.folder / "p.yaml", overrides)
    return cut(build_graph(loaded.pipeline, loaded.folder, loaded.positions), loaded.pipeline, only)


@pytest.mark.parametrize(
    ("only", "overrides", "nodes"),
    [
        (EXPLORE, (), ["prompts", "rollout", "reward", "samples", "experience"]),
        # `samples` needs rewards.
        (["rollout"], (), ["prompts", "rollout", "experience"]),
        (TRAIN, (), ["experience", "ref", "advantage", "update", "samples"]),
        (["update"], (), ["experience", "ref", "update", "samples"]),
        (["reward", "update"], (), ["experience", "reward", "ref", "advantage", "update", "samples"]),
        (["rollout", "advantage"], (), ["prompts", "rollout", "reward", "advantage", "samples", "experience"]),
        (EXPLORE, (TWO,), ["prompts", "rollout", "reward", "samples", "experience"]),
        ((*TRAIN, "critic"), CRITIC, ["experience", "values", "ref", "advantage", "update", "critic", "samples"]),
    ],
)  # fmt: skip
def test_a_part_has_the_named_nodes_those_between_and_those_of_trained_engines(project, only, overrides, nodes):
    part = part_of(project, only, *overrides)
    assert sorted(part.graph.order) == sorted(nodes)
    assert part.explores == ("prompts" in nodes)


def test_one_part_writes_what_the_other_reads(project):
    explorer, trainer = part_of(project, EXPLORE), part_of(project, TRAIN)
    written = explorer.graph.nodes["experience"]
    assert written.inputs["reward"] == Wire("reward", "reward")
    assert written.inputs["policy_version"] == Wire("rollout", "policy_version")
    read = {wire.column for node in trainer.graph.nodes.values() for wire in node.inputs.values()}
    own = {"advantage", "ref_logprob"}
    assert read - own <= written.inputs.keys()
    assert trainer.columns.keys() <= explorer.columns.keys()
    assert trainer.columns["response_mask"] == ("advantage", "update")
    assert trainer.graph.sampled_by("update") == "rollout"


def test_a_column_of_two_writers_has_the_name_of_its_node(project):
    two = (
        "nodes.second={op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}",
        "nodes.other={op: reward, fn: exact, read_from: [second], write: other}",
        *(f"nodes.{name}.read_from=[rollout]" for name in ("reward", "ref", "advantage", "update")),
    )
    explorer, trainer = part_of(project, ["rollout", "second", "reward", "other"], *two), part_of(project, TRAIN, *two)
    assert explorer.graph.nodes["experience"].inputs["rollout.response_tokens"] == Wire("rollout", "response_tokens")
    assert "response_tokens" not in trainer.columns
    assert trainer.columns.keys() <= explorer.columns.keys()


@pytest.mark.parametrize(
    ("only", "overrides", "words"),
    [
        (["rolout"], (), ["`rolout`", "`rollout`"]),
        (["prompts", "rollout"], (), ["`prompts`"]),
        (["reward"], (), ["`rollout`", "`advantage`", "before", "after"]),
        (["rollout", "reward", "advantage", "update"], (), ["leaves no node out"]),
        (["rollout", "reward", "ref"], (), ["`ref`", "`actor`", "`update`"]),
        (["advantage"], (), ["before", "after"]),
        (["rollout", "update", "nope"], (), ["`nope`"]),
        (("keep", *TRAIN), ("nodes.keep={op: filter}",), ["`keep`", "samples"]),
        (EXPLORE, ("nodes.keep={op: filter}",), ["`keep`", "samples"]),
        (EXPLORE, ("nodes.experience={op: reward, fn: math, write: second}",), ["`experience`", "rename"]),
    ],
)  # fmt: skip
def test_a_cut_that_is_not_possible_is_one_sentence(project, only, overrides, words):
    with pytest.raises(PartError) as caught:
        part_of(project, only, *overrides)
    message = str(caught.value)
    assert message.startswith("--only") and "\n" not in message
    assert not [word for word in words if word not in message], message
