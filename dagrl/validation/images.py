"""Checks of prompts with images: a vision model, engines that accept images, and consistent options."""

from __future__ import annotations

from dagrl.backends.families.registry import family_named, family_names, find_family
from dagrl.backends.registry import backend_of
from dagrl.config.columns import IMAGE_COLUMNS
from dagrl.config.errors import Place, listed
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import JudgeNode, Pipeline, TokenizerSpec
from dagrl.graph.dag import Graph
from dagrl.model_files.hf_config import read_config
from dagrl.model_files.images import image_settings
from dagrl.plugins.judging import PROMPT_FIELD

_PLACE: Place = ("data", "image_key")


def check_images(pipeline: Pipeline, graph: Graph | None, findings: Findings) -> None:
    """Report models and engines without images for ``data.image_key``, and options that need this key."""
    data = pipeline.data
    _check_judges(pipeline, findings)
    if data.image_key is None:
        return
    _check_model(pipeline, findings)
    if data.overlong_prompts == "cut":
        message = "a cut would go through images; set it to drop or error"
        findings.error(("data", "overlong_prompts"), message, "cut-images", depends_on=[_PLACE])
    if (data.min_pixels or 1) > (data.max_pixels or 2**63):
        findings.error(("data", "min_pixels"), f"is more than max_pixels, {data.max_pixels}; lower it")
    for name, node in graph.nodes.items() if graph is not None else ():
        key = str(getattr(node.spec, "engine", None))
        engine = pipeline.engines.get(key)
        if engine is None or not set(IMAGE_COLUMNS) & node.inputs.keys():
            continue
        if not engine.takes_images:
            able = [name for name, spec in pipeline.engines.items() if spec.takes_images]
            others = f", as {listed(able)} does" if able else ""
            message = f"backend {backend_of(engine).name} takes no images; use one that does{others}"
            findings.error(("engines", key, "backend"), message, "no-images", depends_on=[_PLACE])
        elif engine.model is not None and (model_type := _is_blind(pipeline, key)):
            message = f"`{key}` is a {model_type}, which reads text; use a model that sees"
            place, depends = ("nodes", name, "engine"), [("engines", key), _PLACE]
            findings.error(place, message, "model-without-vision", depends_on=depends)


def _is_blind(pipeline: Pipeline, engine: str) -> str:
    """The type of an engine's model if it reads only text; empty for vision models and unknown ones."""
    try:
        family = find_family(read_config(pipeline.model_of(engine)).get("model_type"))
    except ValueError:
        return ""  # `model` reports it.
    return family.model_type if family is not None and not family.has_vision else ""


def _check_judges(pipeline: Pipeline, findings: Findings) -> None:
    for name, node in pipeline.nodes.items():
        if not isinstance(node, JudgeNode) or not node.images:
            continue
        place: Place = ("nodes", name, "images")
        if pipeline.data.image_key is None:
            findings.superfluous(place, "prompts have no images", "add `data.image_key`", depends_on=[_PLACE])
        if node.prompt.count(PROMPT_FIELD) != 1:
            message = f"images stand in {PROMPT_FIELD}, which the question needs once; write it there"
            findings.error((*place[:-1], "prompt"), message, "judge-without-prompt", depends_on=[place])
        if node.engine in pipeline.engines and (model_type := _is_blind(pipeline, node.engine)):
            message = f"`{node.engine}` is a {model_type}, which reads text; use a judge that sees"
            findings.error(place, message, "model-without-vision", depends_on=[("engines", node.engine)])


def _check_model(pipeline: Pipeline, findings: Findings) -> None:
    try:
        config = read_config(pipeline.model)
        settings = image_settings(pipeline.model, pipeline.data)
    except ValueError:
        return  # `model` reports it.
    family = find_family(config.get("model_type"))
    if family is None:
        return  # `model_config` reports it.
    tokenizer = pipeline.model.tokenizer
    if not family.has_vision:
        able = listed(name for name in family_names() if family_named(name).has_vision)
        message = f"prompts have images, and a {family.model_type} reads text; use one that sees, as {able} do"
        findings.error(_PLACE, message, "model-without-vision", depends_on=[("model", "init"), ("model", "path")])
    elif isinstance(tokenizer, TokenizerSpec) and not tokenizer.images:
        message = "has no token for images; add `images: true`"
        findings.error(("model", "tokenizer"), message, "model-without-vision", depends_on=[_PLACE])
    elif settings is None:
        message = "the model's config does not name the token for images (image_token_id); add it"
        findings.error(_PLACE, message, "model-without-vision", depends_on=[("model",)])
