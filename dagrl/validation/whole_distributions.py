"""Checks of teachers whose hidden states replace their distributions."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.backends.families.sizes import ModelSizes
from dagrl.backends.registry import backend_of
from dagrl.backends.serving.section import ServerSpec
from dagrl.config.errors import Place
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import LogprobNode, Pipeline, TrainingNode, UpdateNode

_REMEDY = "use `top_k`"


def check_whole_distributions(pipeline: Pipeline, sizes: Mapping[str, ModelSizes], findings: Findings) -> None:
    """Report hidden states that no output layer of a folder completes, and students of another vocabulary."""
    teachers = {
        name: node for name, node in pipeline.nodes.items() if isinstance(node, LogprobNode) and node.hidden_states
    }
    trained = {node.engine for node in pipeline.nodes.values() if isinstance(node, TrainingNode)}
    for number, (name, node) in enumerate(teachers.items()):
        place: Place = ("nodes", name, "hidden_states")
        engine = pipeline.engines.get(node.engine or "")
        if number:
            message = f"the update holds the output layer of one teacher, that of `{next(iter(teachers))}`; {_REMEDY}"
            findings.error(place, message, "several-teachers")
        elif node.endpoint is not None or isinstance(engine, ServerSpec):
            who = "an endpoint" if node.endpoint else "a server"
            findings.error(place, f"{who} does not return these; {_REMEDY}", "no-such-output")
        elif engine is not None and (node.engine in trained or backend_of(engine).weight_reader(engine) is None):
            fact = (
                f"the update reads the teacher's output layer from a Hugging Face folder, and `{node.engine}` has none"
            )
            findings.error(place, f"{fact} of its own; {_REMEDY}", "teacher-without-folder")
    for name, update in pipeline.nodes.items():
        if not isinstance(update, UpdateNode):
            continue
        teacher = pipeline.hidden_teacher_of(update.engine)
        ours, theirs = (sizes[each].vocabulary if each in sizes else None for each in (update.engine, str(teacher)))
        if ours and theirs and ours.value != theirs.value:
            message = (
                f"`{update.engine}` has a vocabulary of {ours.value} (vocab_size), and its teacher `{teacher}` one of "
                f"{theirs.value}; choose a teacher with the same, or {_REMEDY} at the teacher"
            )
            findings.error(("nodes", name, "loss", "distillation", "over"), message, "other-vocabulary")
