"""Checks of tokenizers and models beside the pipeline's own: chat templates, equal vocabularies, reward heads.

Without these checks a run would fail only after its engines have started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagrl.config.columns import LOGPROB_COLUMNS
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    JudgeNode,
    LogprobNode,
    ModelSpec,
    NodeBase,
    Pipeline,
    RewardModelNode,
    RolloutNode,
    TrainingNode,
    ValuesNode,
)
from dagrl.model_files.hf_config import read_config, token_ids
from dagrl.validation.data_files import holds_chats
from dagrl.validation.tokenizer_files import has_tokenizer, listed_tokens, template_problem

_TEMPLATE = "put the model's own into the folder, as chat_template.jinja"
_CLASSIFIER = "ForSequenceClassification"


def check_tokenizers(pipeline: Pipeline, findings: Findings) -> None:
    """Report tokenizers without a required chat template."""
    folder, place = _folder_of(pipeline.model, ("model",))
    if folder is not None:
        sources = pipeline.data.by_key.items()
        responses = {key: pipeline.response_columns(validation=key.partition(".")[0] == "val") for key, _ in sources}
        chats = next((spec for key, spec in sources if holds_chats(spec, responses[key])), None)
        if chats is not None and (problem := template_problem(folder)):
            message = f"{chats.title} has chats as prompts, and {problem}; {_TEMPLATE}, or write prompts as text"
            findings.error(place, message, "missing-chat-template")
    for user, engine in _readers_of_chats(pipeline):
        section = pipeline.model_section(engine)
        folder, place = _folder_of(pipeline.model_of(engine), section)
        if folder is not None and (problem := template_problem(folder)):
            message = f"{user} reads chats, and {problem}; {_TEMPLATE}"
            findings.error(place, message, "missing-chat-template", depends_on=[section])


def check_own_models(pipeline: Pipeline, findings: Findings) -> None:
    """Report engines whose own model has another vocabulary than the pipeline's, or lacks a reward head."""
    for name, engine in pipeline.engines.items():
        section = pipeline.model_section(name)
        if engine.model is not None and section[1] == name and _reads_tokens(pipeline, name):
            _check_vocabulary(pipeline, name, section, findings)
        if engine.reads_messages and engine.head == "reward":
            _check_classifier(pipeline, name, section, findings)


def _folder_of(model: ModelSpec, section: Place) -> tuple[Path | None, Place]:
    """The folder of a model's tokenizer, if it has one, and the place that names it."""
    source, key = (model.path, "path") if model.tokenizer is None else (model.tokenizer, "tokenizer")
    if isinstance(source, Path) and source.is_dir() and has_tokenizer(source):
        return source, (*section, key)
    return None, (*section, key)


def _readers_of_chats(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Nodes and engines that use the chat template of another model, and the engine with that model."""
    for name, engine in pipeline.engines.items():
        if engine.reads_messages and engine.head == "reward":
            yield f"reward model `{name}`", name
    for name, node in pipeline.nodes.items():
        if isinstance(node, JudgeNode) and node.engine in pipeline.engines:
            yield f"judge `{name}`", str(node.engine)


def _reads_tokens(pipeline: Pipeline, name: str) -> bool:
    """Whether the model of an engine is used on the pipeline's token ids."""
    return any(
        _is_on_tokens(pipeline, node)
        for node in pipeline.nodes.values()
        if (engine := getattr(node, "engine", None)) in pipeline.engines
        and pipeline.model_section(str(engine)) == ("engines", name, "model")
    )


def _is_on_tokens(pipeline: Pipeline, node: NodeBase) -> bool:
    if isinstance(node, RewardModelNode):
        return not pipeline.engines[node.engine].reads_messages
    return isinstance(node, RolloutNode | LogprobNode | ValuesNode | TrainingNode)


def _teaches(pipeline: Pipeline, name: str) -> bool:
    """Whether the policy learns from the log-probs of an engine's model: neither its own nor a reference's."""
    return any(
        isinstance(node, LogprobNode)
        and node.written_as("logprob") not in LOGPROB_COLUMNS
        and node.engine in pipeline.engines
        and pipeline.model_section(node.engine) == ("engines", name, "model")
        for node in pipeline.nodes.values()
    )


def _check_vocabulary(pipeline: Pipeline, name: str, section: Place, findings: Findings) -> None:
    own, depends, teaches = pipeline.model_of(name), [("model",)], _teaches(pipeline, name)
    try:
        ours = token_ids(pipeline.model.tokenizer or pipeline.model.path)
        mine, rows = (read_config(model).get("vocab_size") for model in (pipeline.model, own))
    except ValueError:
        return  # `model.py` reports unreadable files.
    # The policy's embedding may lack rows for tokens that no text contains; `model.py` reports others.
    remedy = f"use a {'teacher' if teaches else 'model'} of the same family"
    sampled = {token: number for token, number in ours.items() if not isinstance(mine, int) or number < mine}
    needed = max(sampled.values(), default=-1) + 1
    if isinstance(rows, int) and rows < needed:
        message = f"it has rows for {rows} tokens, and the pipeline's tokenizer has {needed}"
        findings.error(section, f"{message}; {remedy}", "other-vocabulary", depends_on=depends)
        return
    theirs = listed_tokens(own.tokenizer or own.path)
    if theirs is None:
        if teaches:
            message = "it has no tokenizer.json, so it is not known whether its tokens are the policy's; add the file"
            findings.warning(section, message, "unknown-tokens", depends_on=depends)
        return
    moved = next((token for token, number in ours.items() if theirs.get(token, number) != number), None)
    unknown = next((token for token in (sampled if teaches else ours) if token not in theirs), None)
    if moved is not None:
        fact = f"{moved!r} is token {ours[moved]} of the pipeline's tokenizer, and {theirs[moved]} of its own"
        findings.error(section, f"{fact}; {remedy}", "other-vocabulary", depends_on=depends)
    elif unknown is not None and teaches:
        fact = f"its tokenizer has no {unknown!r}, token {ours[unknown]} of the pipeline's, which the policy can sample"
        findings.error(section, f"{fact}; {remedy}", "other-vocabulary", depends_on=depends)
    elif unknown is not None:
        message = f"it does not know the token {unknown!r}; check that the policy's chat template does not use it"
        findings.warning(section, message, "unknown-tokens", depends_on=depends)


def _check_classifier(pipeline: Pipeline, name: str, section: Place, findings: Findings) -> None:
    model = pipeline.model_of(name)
    try:
        classes = read_config(model).get("architectures") if model.path else None
    except ValueError:
        return  # `model.py` reports it.
    if isinstance(classes, list) and classes and not any(str(each).endswith(_CLASSIFIER) for each in classes):
        remedy = f"set `model: {{path: ...}}` of `{name}` to a sequence classifier with one label"
        message = f"{model.path} is a {classes[0]}, which has no score; {remedy}"
        place: Place = (*section, "path") if section != ("model",) else ("engines", name, "head")
        findings.error(place, message, "no-reward-head", depends_on=[section])
