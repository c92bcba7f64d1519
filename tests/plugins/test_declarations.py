"""The user's own estimators and losses: how they say what they read."""

import pytest

from dagrl.config.schema import AdvantageNode, Scope, UpdateNode
from dagrl.plugins.declarations import estimator, load_formula, loss

SOURCE = """
import dagrl
@dagrl.estimator(reads=["reward", "old_logprob"], scope="batch")
def best(batch): ...
@dagrl.estimator()
def usual(batch): ...
@dagrl.loss(reads=["advantage", "ref_logprob", "my_weights"])
def weighted(tokens): ...
@dagrl.loss()
def plain(tokens): ...
@dagrl.loss(reads=["prompt_tokens"])
def of_prompts(tokens): ...
@dagrl.loss(reads=["advantage", "logprob"])
def greedy(tokens): ...
def bare(batch): ...
"""


@pytest.fixture
def contract(project):
    """The contract of a node with a formula of `SOURCE`."""
    project.write("own_formulas.py", SOURCE)

    def of(kind: type, name: str, **options):
        place = f"own_formulas:{name}"
        node = (
            AdvantageNode(op="advantage", estimator=place, **options)
            if kind is AdvantageNode
            else UpdateNode(op="update", engine="actor", loss={"policy": place, **options})
        )
        return node.contract(declared=load_formula(node, project.folder)[1])

    return of


def test_an_estimator_reads_its_columns_beside_reward_and_mask(contract):
    best, usual = contract(AdvantageNode, "best"), contract(AdvantageNode, "usual")
    assert (best.reads, best.scope) == (("reward", "response_mask", "old_logprob"), Scope.BATCH)
    assert (usual.reads, usual.scope, usual.writes) == (
        ("reward", "response_mask", "group_id"),
        Scope.GROUP,
        ("advantage",),
    )
    charged = contract(AdvantageNode, "usual", kl_in_reward={"coef": 0.1})
    assert charged.reads[-2:] == ("old_logprob", "ref_logprob")


def test_a_loss_reads_its_columns_beside_the_samples(contract):
    weighted, plain = contract(UpdateNode, "weighted"), contract(UpdateNode, "plain")
    samples = ("prompt_tokens", "response_tokens", "response_mask", "advantage", "policy_version")
    assert weighted.reads == (*samples, "ref_logprob", "my_weights")
    assert plain.reads == samples
    # Nobody need write the old log-probs: the current ones stand in.
    assert "old_logprob" in plain.reads_if_written
    assert "old_logprob" not in weighted.reads_if_written


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (AdvantageNode, "bare", r"does not declare its columns; decorate it with @dagrl.estimator\(reads="),
        (UpdateNode, "bare", r"does not declare its columns; decorate it with @dagrl.loss\(reads="),
        (UpdateNode, "best", "is decorated with @dagrl.estimator; decorate it with @dagrl.loss"),
        (AdvantageNode, "plain", "is decorated with @dagrl.loss; decorate it with @dagrl.estimator"),
        (AdvantageNode, "besd", "has no function 'besd'; did you mean `best`?"),
        (
            UpdateNode,
            "of_prompts",
            "reads `prompt_tokens`, which is per prompt token, not per response",
        ),
        (UpdateNode, "greedy", "reads `logprob`, which every loss gets; remove it from `reads`"),
    ],
)
def test_unusable_input_is_one_sentence(contract, kind, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        contract(kind, name)
    assert "\n" not in str(caught.value)


def test_decorators_refuse_an_unknown_scope_and_columns_given_as_text():
    with pytest.raises(ValueError, match="scope cannot be 'rows'; did you mean `row`"):
        estimator(scope="rows")
    with pytest.raises(ValueError, match="columns that the loss reads are a list of names, not 'advantage'"):
        loss(reads="advantage")


def test_formulas_of_dagrls_own_need_none(project):
    assert load_formula(AdvantageNode(op="advantage", estimator="grpo"), project.folder) is None
    assert load_formula(UpdateNode(op="update", engine="actor"), project.folder) is None


def test_a_loss_that_knows_groups_gets_them_whole(contract, project):
    project.write("of_groups.py", 'import dagrl\n@dagrl.loss(reads=["advantage", "group_id"])\ndef f(tokens): ...\n')
    node = UpdateNode(op="update", engine="actor", loss={"policy": "of_groups:f"})
    assert node.contract(declared=load_formula(node, project.folder)[1]).whole_groups
    assert not contract(UpdateNode, "plain").whole_groups
