"""A pipeline's demands on its tokenizers: a chat template for chats, and an end token for the data set's responses.

Without this check a run would end only after its engines have started.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import JudgeNode, ModelSpec, Pipeline
from dagrl.graph.offline import columns_read
from dagrl.graph.rollouts import rollouts
from dagrl.validation.data_files import holds_chats
from dagrl.validation.tokenizer_files import has_end_token, has_tokenizer, template_problem

_TEMPLATE = "put the model's own into the folder, as chat_template.jinja"


def check_tokenizer_use(pipeline: Pipeline, findings: Findings) -> None:
    """Report folders of tokenizers that lack a chat template, or an end token, that the pipeline needs."""
    folder, place = _folder_of(pipeline.model, ("model",))
    if folder is not None:
        chats = next((path for path in _prompt_files(pipeline)), None)
        if chats is not None and (problem := template_problem(folder)):
            findings.error(place, f"{chats} has chats as prompts, and {problem}; {_TEMPLATE}, or write prompts as text")
        if not has_end_token(folder):
            _report_no_end(pipeline, folder, place, findings)
    for user, engine in _readers_of_chats(pipeline):
        section = pipeline.model_section(engine)
        folder, place = _folder_of(pipeline.model_of(engine), section)
        if folder is not None and (problem := template_problem(folder)):
            findings.error(place, f"{user} reads chats, and {problem}; {_TEMPLATE}", depends_on=[section])


def _folder_of(model: ModelSpec, section: Place) -> tuple[Path | None, Place]:
    """Return the folder that holds the tokenizer, where there is one, and the place that names it."""
    source, key = (model.path, "path") if model.tokenizer is None else (model.tokenizer, "tokenizer")
    folder = source if isinstance(source, Path) and source.is_dir() and has_tokenizer(source) else None
    return folder, (*section, key)


def _prompt_files(pipeline: Pipeline) -> Iterator[Path]:
    """Yield the data files whose prompts are chats."""
    for key, path in pipeline.data.files.items():
        if holds_chats(path, columns_read(pipeline, validation=key != "train")):
            yield path


def _readers_of_chats(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield what asks a model by the model's own chat template, and the engine with that model."""
    for name, engine in pipeline.engines.items():
        if engine.reads_messages and engine.head == "reward":
            yield f"reward model `{name}`", name
    for name, node in pipeline.nodes.items():
        if isinstance(node, JudgeNode) and node.engine in pipeline.engines:
            yield f"judge `{name}`", str(node.engine)


def _report_no_end(pipeline: Pipeline, folder: Path, place: Place, findings: Findings) -> None:
    said = f"the tokenizer in {folder} has no eos_token"
    if pipeline.data.responses:
        findings.error(
            place, f"{said}, which the responses of data.responses end with; add it to tokenizer_config.json"
        )
    elif any(not node.sampling.stop_token_ids for node in rollouts(pipeline).values()):
        message = f"{said}, so responses may end at max_new_tokens alone; add it to tokenizer_config.json"
        findings.warning(place, message)
