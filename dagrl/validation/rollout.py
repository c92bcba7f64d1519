"""Which prompts a rollout begins, finishes and carries to the next step."""

from __future__ import annotations

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import Pipeline, RolloutNode, UpdateNode
from dagrl.graph.dag import PROMPTS_NODE, Graph
from dagrl.graph.filtering import filter_of, prompts_per_round
from dagrl.graph.rollouts import leading_rollout, rollouts

_STEP_NEEDS = "a step needs (data.prompts_per_step"
_ONLY_PARTIAL = ("mask_offpolicy_in_partial_rollout", "partial_rollout_max_age")
_ONLY_ALONE = ("over_sampling_batch_size", "partial_rollout")


def check_rollout(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report options of the rollout that contradict each other; `graph` is None where columns are not sorted out."""
    for name, node in pipeline.nodes.items():
        if isinstance(node, RolloutNode):
            place: Place = ("nodes", name)
            _check_over_sampling(pipeline, place, node, findings)
            alone = len(rollouts(pipeline)) == 1
            _check_partial(place, node, findings, alone=alone)
            if graph is not None and alone and node.over_sampling_batch_size is not None:
                _check_others_wait(name, graph, findings)
            if graph is not None:
                _check_prompts(name, node, graph, findings)
        if isinstance(node, UpdateNode) and graph is not None:
            _warn_of_foreign_samples(pipeline, name, node, graph, findings)
    if graph is not None and len(rollouts(pipeline)) > 1:
        _check_several(pipeline, graph, findings)


def _warn_of_foreign_samples(pipeline: Pipeline, name: str, node: UpdateNode, graph: Graph, findings: Findings) -> None:
    """Samples of one policy that another learns from as if they were its own."""
    rollout = graph.sampled_by(name)
    sampler = pipeline.engines.get(rollouts(pipeline)[rollout].engine) if rollout else None
    follows = getattr(sampler, "weights_from", None)
    corrected = node.rollout_correction is not None or node.takes_rollout_for_old
    if follows is None or follows == node.engine or corrected or node.loss.policy == "opmd":
        return
    message = (
        f"`{node.engine}` learns from samples of `{follows}`, whose weights `{rollout}` draws with, as if they were "
        "its own; give it a rollout that follows it, or say `read: {old_logprob: rollout_logprob}`"
    )
    findings.warning(("nodes", name), message, depends_on=[("nodes",), ("engines",)])


def _check_prompts(name: str, node: RolloutNode, graph: Graph, findings: Findings) -> None:
    if node.max_prompt_tokens is not None and graph.nodes[name].inputs["prompt_tokens"].node == PROMPTS_NODE:
        message = "the prompts are those of the data set, whose longest is data.max_prompt_tokens; take it out"
        findings.error(("nodes", name, "max_prompt_tokens"), message)


def _check_several(pipeline: Pipeline, graph: Graph, findings: Findings) -> None:
    """Rollouts share the rows of a batch: as many for each prompt as the leading one samples."""
    leading, found = leading_rollout(pipeline), rollouts(pipeline)
    for name, node in found.items():
        place: Place = ("nodes", name)
        for option in _ONLY_ALONE:
            if getattr(node, option):
                message = f"works where there is one rollout, and there are {len(found)}; take it out"
                findings.error((*place, option), message)
        behind = [other for other in found if other in graph.ancestors(name)]
        if behind and node.n > 1:
            message = f"it comes behind `{behind[0]}` and answers each of its rows once; take `n` out"
            findings.error((*place, "n"), message, depends_on=[("nodes", other) for other in behind])
        elif not behind and node.n != found[leading].n:
            message = (
                f"`{leading}` samples {found[leading].n} responses to each prompt, and all columns of a step have the "
                f"same rows; set `n: {found[leading].n}`"
            )
            findings.error((*place, "n"), message, depends_on=[("nodes", leading, "n")])


def _check_over_sampling(pipeline: Pipeline, place: Place, node: RolloutNode, findings: Findings) -> None:
    needed, begun = prompts_per_round(pipeline), node.over_sampling_batch_size
    if begun is not None and begun <= needed:
        chooser = filter_of(pipeline)
        what = "a round takes (prompts_per_round" if chooser and chooser.prompts_per_round else _STEP_NEEDS
        message = (
            f"{begun} prompts are not more than {what} = {needed}), so that none could be aborted; choose more, such "
            f"as {needed + max(1, needed // 4)}, or take it out"
        )
        depends: list[Place] = [("data", "prompts_per_step")]
        findings.error((*place, "over_sampling_batch_size"), message, depends_on=depends)


def _check_partial(place: Place, node: RolloutNode, findings: Findings, *, alone: bool) -> None:
    """`alone`: whether it is the only rollout; several can have neither of the two options."""
    if node.partial_rollout and node.over_sampling_batch_size is None and alone:
        message = (
            "no response is ever left unfinished, for a step waits for all of its prompts; set "
            "`over_sampling_batch_size` to more prompts than a step needs, or take this out"
        )
        findings.error((*place, "partial_rollout"), message, depends_on=[(*place, "over_sampling_batch_size")])
    for option in _ONLY_PARTIAL:
        if option in node.model_fields_set and not node.partial_rollout:
            message = (
                "without `partial_rollout: true` no response has tokens of an earlier step; add that, or take it out"
            )
            findings.error((*place, option), message, depends_on=[(*place, "partial_rollout")])


def _check_others_wait(rollout: str, graph: Graph, findings: Findings) -> None:
    """Nodes that do not wait for the rollout would work on prompts that it then leaves out, and in other shards."""
    for name in graph.in_rounds or graph.nodes:
        # Who reads from such a node follows from it.
        if name != rollout and graph.ancestors(name) == {PROMPTS_NODE}:
            message = (
                f"it works on the prompts before `{rollout}` has sampled them, and `over_sampling_batch_size` leaves "
                "some of them out; let it read a column of the rollout, such as `finish_reason`, too"
            )
            depends: list[Place] = [("nodes", rollout, "over_sampling_batch_size")]
            findings.error(("nodes", name), message, depends_on=depends)
