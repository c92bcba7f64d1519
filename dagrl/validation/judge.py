"""Judges: that somebody can be asked, that the question shows the response, and that a score can be found."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from dagrl.backends.families.sizes import ModelSizes
from dagrl.config.errors import Place, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import JudgeNode, Pipeline
from dagrl.graph.plugins.isolation import ask
from dagrl.graph.plugins.judging import FIELDS, fields_in, is_function, parser_arguments_at

_OF_ENDPOINTS = ("model", "api_key_env", "extra_body", "concurrency", "retries", "timeout_s", "expected_s")
_OF_ENGINES = ("max_prompt_tokens", "chat_template_kwargs")


def check_judges(pipeline: Pipeline, folder: Path, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report what is wrong with nodes that ask a judge; `folder` holds the user's own modules."""
    for name, node in pipeline.nodes.items():
        if not isinstance(node, JudgeNode):
            continue
        place: Place = ("nodes", name)
        _check_who(place, node, findings)
        if node.endpoint is None and node.engine in pipeline.engines:
            _check_engine(place, node, pipeline, findings)
            _check_room(place, node, sizes, findings)
        _check_question(place, node, findings)
        _check_parser(place, node, folder, findings)


def _check_who(place: Place, node: JudgeNode, findings: Findings) -> None:
    if (node.engine is None) == (node.endpoint is None):
        what = "nobody is asked" if node.engine is None else "two are asked"
        findings.error(place, f"{what}; name an `engine` of this pipeline, or an `endpoint` and its `model`")
        return
    if node.endpoint is not None and not node.model:
        findings.error(
            (*place, "endpoint"), "nobody says which of its models is asked; add `model: NAME`, as the server calls it"
        )
    if node.endpoint is not None:
        _check_address((*place, "endpoint"), node.endpoint, findings)
    foreign, whose = (_OF_ENDPOINTS, "endpoint") if node.engine else (_OF_ENGINES, "engine")
    for option in foreign:
        if option in node.model_fields_set:
            findings.error((*place, option), f"only a judge at an {whose} has this; take it out")
    if node.api_key_env and node.endpoint and not os.environ.get(node.api_key_env):
        message = f"the environment variable {node.api_key_env} is not set here; set it where the run's workers start"
        findings.warning((*place, "api_key_env"), message)


def _check_address(place: Place, address: str, findings: Findings) -> None:
    try:
        parts = urlsplit(address)
    except ValueError as error:
        findings.error(place, f"it is no address: {error}; write one such as http://host:8000/v1")
        return
    if not parts.hostname:
        findings.error(place, "the address names no host; write one such as http://host:8000/v1")
    elif "@" in parts.netloc or parts.query:
        what = "the address holds more than a place, and the run folder shows it"
        findings.error(place, f"{what}; name the key's variable in api_key_env")


def _check_engine(place: Place, node: JudgeNode, pipeline: Pipeline, findings: Findings) -> None:
    assert node.engine is not None
    follows = getattr(pipeline.engines[node.engine], "weights_from", None)
    if follows is not None:
        message = (
            f"`{node.engine}` follows `{follows}`, so that the policy judges itself, by another measure in each step; "
            "for a judge that stays as it is, add an engine that follows none"
        )
        findings.warning((*place, "engine"), message, depends_on=[("engines", node.engine)])


def _check_room(place: Place, node: JudgeNode, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    assert node.engine is not None
    positions = sizes[node.engine].positions if node.engine in sizes else None
    longest = node.max_prompt_tokens + node.sampling.max_new_tokens
    if positions is not None and longest > positions.value:
        message = (
            f"a question of {node.max_prompt_tokens} tokens and a reply of {node.sampling.max_new_tokens} "
            f"(sampling.max_new_tokens) exceed the model's {positions.name}, {positions.value}; lower one of them"
        )
        depends: list[Place] = [(*place, "engine"), ("engines", node.engine), ("model",)]
        findings.error((*place, "max_prompt_tokens"), message, depends_on=depends)


def _check_question(place: Place, node: JudgeNode, findings: Findings) -> None:
    found = fields_in(node.prompt)
    if "response" not in found:
        findings.error((*place, "prompt"), "the judge would never see the response; write {response} where it goes")
    for unknown in sorted(found - set(FIELDS)):
        message = f"there is no field {{{unknown}}}, so it stays as it is; {suggest(unknown, FIELDS)}"
        findings.warning((*place, "prompt"), message)


def _check_parser(place: Place, node: JudgeNode, folder: Path, findings: Findings) -> None:
    parser: Place = (*place, "parser")
    if is_function(node.parser):
        try:
            ask(node.parser, parser_arguments_at, node.parser, folder=folder)
        except ValueError as error:
            findings.error(parser, str(error))
        if node.scores is not None:
            findings.error((*place, "scores"), f"`{node.parser}` returns the score itself; take one of the two out")
        return
    try:
        re.compile(node.parser)
    except re.error as error:
        message = f"it is no regular expression: {error}; mend it, or name your own `module:function`"
        findings.error(parser, message)
