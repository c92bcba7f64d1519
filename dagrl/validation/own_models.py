"""Engines with a model of their own: it reads the tokens of the pipeline, and is what its head says."""

from __future__ import annotations

from pathlib import Path

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import LogprobNode, NodeBase, Pipeline, RewardModelNode, RolloutNode, TrainingNode, ValuesNode
from dagrl.models.hf_config import read_config, token_ids

_CLASSIFIER = "ForSequenceClassification"


def check_own_models(pipeline: Pipeline, findings: Findings) -> None:
    """Report models of another vocabulary than the pipeline's, and folders of language models where scores are needed.

    Reads small files of the models' folders; `model.py` reports those that cannot be read.
    """
    for name, engine in pipeline.engines.items():
        section = pipeline.model_section(name)
        try:
            if engine.model is not None and section[1] == name and _reads_tokens(pipeline, name):
                _check_vocabulary(pipeline, name, section, findings)
            if engine.reads_messages and engine.head == "reward":
                _check_classifier(pipeline, name, section, findings)
        except ValueError:
            continue


def _reads_tokens(pipeline: Pipeline, name: str) -> bool:
    """Whether an engine with this model works on the pipeline's tokens as they are."""
    return any(
        _on_tokens(pipeline, node)
        for node in pipeline.nodes.values()
        if (engine := getattr(node, "engine", None)) in pipeline.engines
        and pipeline.model_section(str(engine)) == ("engines", name, "model")
    )


def _on_tokens(pipeline: Pipeline, node: NodeBase) -> bool:
    if isinstance(node, RewardModelNode):
        return not pipeline.engines[node.engine].reads_messages
    return isinstance(node, RolloutNode | LogprobNode | ValuesNode | TrainingNode)


def _check_vocabulary(pipeline: Pipeline, name: str, section: Place, findings: Findings) -> None:
    own = pipeline.model_of(name)
    ours = token_ids(pipeline.model.tokenizer or pipeline.model.path)
    rows = read_config(own).get("vocab_size")
    needed = max(ours.values(), default=-1) + 1
    if isinstance(rows, int) and rows < needed:
        message = f"it has rows for {rows} tokens, and the pipeline's tokenizer has {needed}"
        findings.error(section, f"{message}; take a model of the same family", depends_on=[("model",)])
        return
    source = own.tokenizer or own.path
    if not isinstance(source, Path) or not (source.expanduser() / "tokenizer.json").is_file():
        return
    theirs = token_ids(source)
    moved = next((token for token, number in ours.items() if theirs.get(token, number) != number), None)
    unknown = next((token for token in ours if token not in theirs), None)
    if moved is not None:
        message = (
            f"it would read other words than the policy has written: {moved!r} is token {ours[moved]} of the "
            f"pipeline's tokenizer, and {theirs[moved]} of its own; take a model of the same family"
        )
        findings.error(section, message, depends_on=[("model",)])
    elif unknown is not None:
        message = f"it was not trained with all of the pipeline's tokens: it has no {unknown!r}, for one; see that the "
        findings.warning(section, message + "policy's chat template does without them", depends_on=[("model",)])


def _check_classifier(pipeline: Pipeline, name: str, section: Place, findings: Findings) -> None:
    """Report the folder of a language model, which has no score; the config names the class of a classifier."""
    model = pipeline.model_of(name)
    classes = read_config(model).get("architectures") if model.path else None
    if isinstance(classes, list) and classes and not any(str(each).endswith(_CLASSIFIER) for each in classes):
        message = (
            f"{model.path} is a {classes[0]}, which has no score; give `{name}` the folder of a reward model under "
            f"`model: {{path: ...}}`: a sequence classifier with one label"
        )
        place: Place = (*section, "path") if section != ("model",) else ("engines", name, "head")
        findings.error(place, message, depends_on=[section])
