"""Rewards, judges and sampling options: whether functions can be called, and options fit each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from dagrl.backends.families.sizes import ModelSizes
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.error_messages import faults_of
from dagrl.config.loading.positions import Findings
from dagrl.config.reward_names import BUILT_IN_REWARDS
from dagrl.config.schema import (
    JudgeNode,
    LogprobNode,
    Pipeline,
    RewardNode,
    SourceReward,
    TrainingNode,
)
from dagrl.plugins.custom import load_function
from dagrl.plugins.declarations import checked_traits, fields_of
from dagrl.plugins.isolation import ask
from dagrl.plugins.judging import FIELDS, fields_in, is_function, parser_arguments
from dagrl.validation.scorers import check_source


def check_rewards(pipeline: Pipeline, folder: Path, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report wrong rewards, judges, references and sampling options.

    `folder` holds the user's modules, `sizes` are the sizes of the engines' models.
    """
    for name, node in pipeline.nodes.items():
        place: Place = ("nodes", name)
        match node:
            case RewardNode():
                for source, function in node.functions.items():
                    where = place if source is None else (*place, "by_source", source)
                    _check_reward(where, place, function, node.concurrency, folder, findings)
            case LogprobNode():
                _warn_of_moving_reference(pipeline, place, node, findings)
            case JudgeNode():
                if check_source(place, node, findings) and node.engine in pipeline.engines:
                    _check_judge(pipeline, place, node, sizes, findings)
                _check_question(place, node, folder, findings)


def _check_reward(
    place: Place, node_place: Place, node: SourceReward, concurrency: int | None, folder: Path, findings: Findings
) -> None:
    where: Place = (*place, "fn")
    if node.fn not in BUILT_IN_REWARDS and ":" not in node.fn:
        message = f"there is no reward `{node.fn}` (write your own as `module:function`)"
        findings.error(where, f"{message}; {suggest(node.fn, BUILT_IN_REWARDS)}", "unknown-reward")
        return
    name = BUILT_IN_REWARDS.get(node.fn, node.fn)
    try:
        traits = ask(name, checked_traits, name, folder=folder)
        where = (*place, "args") if node.args else where
        ask(name, fields_of, node.args, folder=folder)
    except ValueError as error:
        findings.error(where, str(error), "invalid-reward")
        return
    if node.fn in BUILT_IN_REWARDS:
        _check_values(where, name, node.args, findings)
    if concurrency is not None and traits.batched:
        findings.superfluous((*node_place, "concurrency"), f"one call of `{node.fn}` scores all samples of a shard")


def _check_values(where: Place, name: str, args: dict[str, object], findings: Findings) -> None:
    hints = get_type_hints(load_function(name), include_extras=True)
    fields: dict[str, Any] = {key: (hints[key], ...) for key in args}
    try:
        create_model("Args", __config__=ConfigDict(strict=True), **fields).model_validate(args)
    except ValidationError as error:
        for fault in faults_of(error, args):
            findings.error((*where, *fault.place), fault.message, "invalid-reward")


def _warn_of_moving_reference(pipeline: Pipeline, place: Place, node: LogprobNode, findings: Findings) -> None:
    trained = [other.engine for other in pipeline.nodes.values() if isinstance(other, TrainingNode)]
    if node.written_as("logprob") == "ref_logprob" and node.engine in trained:
        remedy = f"for the start weights, name an engine with `frozen_copy_of: {node.engine}`"
        message = f"`{node.engine}` is trained, so the reference moves with the policy; {remedy}"
        findings.warning((*place, "engine"), message, "moving-reference", depends_on=[("engines",)])


def _check_judge(
    pipeline: Pipeline, place: Place, node: JudgeNode, sizes: Mapping[str, ModelSizes], findings: Findings
) -> None:
    engine = str(node.engine)
    if source := getattr(pipeline.engines[engine], "weights_from", None):
        message = f"the policy judges itself, with the weights of `{source}`; use an engine without `weights_from`"
        findings.warning((*place, "engine"), message, "moving-judge")
    positions = sizes[engine].positions if engine in sizes else None
    longest = node.max_prompt_tokens + node.sampling.max_new_tokens
    if positions is not None and longest > positions.value:
        tokens = f"a question of {node.max_prompt_tokens} and a reply of {node.sampling.max_new_tokens} tokens"
        message = f"{tokens} exceed the model's {positions.name}, {positions.value}; lower one of them"
        depends: list[Place] = [("engines", engine), ("model",)]
        findings.error((*place, "max_prompt_tokens"), message, "sample-too-long", depends_on=depends)


def _check_question(place: Place, node: JudgeNode, folder: Path, findings: Findings) -> None:
    fields = fields_in(node.prompt)
    if "response" not in fields:
        message = "the question does not contain the response; write {response} where it goes"
        findings.error((*place, "prompt"), message, "judge-without-response")
    for unknown in sorted(fields - set(FIELDS)):
        message = f"there is no field {{{unknown}}}, so it stays as it is; {suggest(unknown, FIELDS)}"
        findings.warning((*place, "prompt"), message, "unknown-field")
    try:
        if is_function(node.parser):
            ask(node.parser, parser_arguments, folder=folder)
        else:
            re.compile(node.parser)
    except re.error as error:
        message = f"is no regular expression: {error}; fix it, or name your own `module:function`"
        findings.error((*place, "parser"), message, "invalid-parser")
    except ValueError as error:
        findings.error((*place, "parser"), str(error), "invalid-parser")
    if is_function(node.parser) and node.scores is not None:
        message = f"`{node.parser}` returns the score itself; remove one of them"
        findings.error((*place, "scores"), message, "option-without-effect")
