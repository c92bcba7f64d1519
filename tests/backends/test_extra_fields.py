"""Fields under ``extra:`` that the installed library does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.backends.environments import made_environments
from dagrl.backends.megatron.fields import DdpFields, OptimizerFields, TransformerFields
from dagrl.backends.megatron.section import LearningRateSpec
from dagrl.backends.sglang.fields import ServerFields
from dagrl.backends.vllm.fields import VllmFields
from dagrl.config.schema.library_fields import LibraryFields
from dagrl.model_files.library_classes import LibraryClass, arguments_of_class
from dagrl.validation import check_file

GENERATOR = "  generator: {backend: hf, group: rollout, weights_from: actor}\n"
SGLANG = GENERATOR.replace("hf", "sglang").replace("}", ", extra: {server: {%s: 1}}} #!")


def known_to(table: type[LibraryFields]) -> tuple[str, ...]:
    """The library's fields, wherever it is installed; skips where it is not."""
    package = table.library_class[0]
    pytest.importorskip(package) if package == "vllm" and package not in made_environments() else None
    names = arguments_of_class(LibraryClass(*table.library_class), made_environments().get(package))
    assert names is not None, f"{table.library_class} is not where the tested version has it"
    return names


@pytest.mark.parametrize("table", [TransformerFields, OptimizerFields, DdpFields, ServerFields, VllmFields])
def test_the_class_is_found_in_the_tested_version(table: type[LibraryFields]) -> None:
    known = known_to(table)
    assert {*table.model_fields, *table.refused} <= set(known)
    # A name of elsewhere is none of the library's, and stands for tested fields.
    assert not set(table.called_elsewhere) & set(known)
    meant = {field for fields in table.called_elsewhere.values() for field in fields}
    schedule = {f"lr_schedule.{name}" for name in LearningRateSpec.model_fields} if table is OptimizerFields else set()
    assert meant <= {*table.model_fields, *schedule}


@pytest.mark.parametrize(
    ("section", "field", "named"),
    [
        ("optimizer", "learning_rate", "did you mean `lr`?"),
        ("optimizer", "max_grad_norm", "did you mean `clip_grad`?"),
        ("optimizer", "betas", "did you mean `adam_beta1` and `adam_beta2`?"),
        ("optimizer", "eps", "did you mean `adam_eps`?"),
        ("optimizer", "wieght_decay", "did you mean `weight_decay`?"),
        ("transformer", "router_aux_loss_coef", "did you mean `moe_aux_loss_coeff`?"),
        ("transformer", "fp8_margn", "did you mean `fp8_margin`?"),
        ("transformer", "zzz", "remove it"),
        ("ddp", "num_bucket", "did you mean `num_buckets`?"),
    ],
)
def test_a_name_that_megatron_lacks_is_an_error(project, section: str, field: str, named: str) -> None:
    extra = f"    extra: {{{section}: {{{field}: 1}}}} #!\n"
    path = project.pipeline(("    group: train\n", f"    group: train\n{extra}"))
    project.assert_problem(path, f"engines.actor.extra.{section}.{field}", "unknown-field", named)


@pytest.mark.parametrize("field", ["learning_rate", "max_grad_norm", "betas"])
def test_a_tested_field_under_another_name_is_not_sent_to_extra(project, field: str) -> None:
    path = project.pipeline(("optimizer: {lr: 1e-3}", f"optimizer: {{lr: 1e-3, {field}: 1}} #!"))
    project.assert_problem(
        path, f"engines.actor.optimizer.{field}", "untested-field", "another name here; did you mean"
    )


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("tensor_parallel_size", "`tp_size`"),
        ("max_model_len", "`context_length`"),
        ("schedul_policy", "schedule_policy"),
    ],
)
def test_a_name_that_sglang_lacks_is_an_error(project, field: str, named: str) -> None:
    path = project.pipeline((GENERATOR, SGLANG % field))
    project.assert_problem(path, f"engines.generator.extra.server.{field}", "unknown-field", named)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with a package of two modules."""
    package = tmp_path / "lib" / "python3.12" / "site-packages" / "library"
    (package / "engine").mkdir(parents=True)
    (package / "base.py").write_text("@dataclass\nclass Base:\n    size: int = 1\n    kept: ClassVar[int] = 2\n")
    (package / "engine" / "args.py").write_text(
        "from ..base import Base as _Base\nfrom library.gone import Gone\n"
        "class Args(_Base):\n    rate: float\n    made: int = field(init=False)\n    name = 'x'\n"
        "class Orphan(Gone):\n    rate: float\n"
    )
    (package / "broken.py").write_text("class Args(:\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "name", "known"),
    [
        ("engine/args.py", "Args", ("size", "rate")),
        ("engine/args.py", "Other", None),
        ("engine/args.py", "Orphan", None),
        ("engine/none.py", "Args", None),
        ("broken.py", "Args", None),
    ],
)
def test_fields_are_read_from_the_environment(
    environment: Path, file: str, name: str, known: tuple[str, ...] | None
) -> None:
    assert arguments_of_class(LibraryClass("library", file, name), environment) == known


@pytest.mark.parametrize("known", [None, ()], ids=["class is elsewhere", "class collects its fields"])
def test_another_shape_of_the_library_leaves_the_warning(project, monkeypatch, known) -> None:
    monkeypatch.setattr("dagrl.backends.extra_fields.arguments_of_class", lambda *_: known)
    (warning,) = check_file(project.pipeline((GENERATOR, SGLANG % "no_such_field"))).warnings
    assert (warning.place, warning.code) == ("engines.generator.extra", "untested-fields")
