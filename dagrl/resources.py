"""Finds templates, preprocessing scripts and pages: beside the package in the repository, inside it in a wheel."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE / "_resources"
"""Folder of a wheel, to which `pyproject.toml` maps the repository's folders."""
_LONGEST_NAME, _LONGEST_PATH = 255, 4096
"""Bytes that Linux takes, of a path with its closing NUL."""


def resource_folder(name: str) -> Path:
    """Return the folder that the repository calls `name`: ``dag_templates``, ``data_preprocess`` or ``docs``."""
    return (_INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent) / name


OWN_TEMPLATES = resource_folder("dag_templates")
"""dagrl's own templates, their data, and the modules that they name."""
DATA_SCRIPTS = resource_folder("data_preprocess")
"""Scripts that write prompt files."""
PAGES = resource_folder("docs")
"""The documentation, as Markdown."""


def why_no_path(text: str) -> str | None:
    """Return why no file can have this path, as the end of a sentence; None if one can."""
    if "\0" in text:
        return "contains a NUL character"
    if max(map(len, map(os.fsencode, text.split("/")))) > _LONGEST_NAME or len(os.fsencode(text)) >= _LONGEST_PATH:
        return "is longer than file systems take"
    return None


def pipeline_file(path: Path) -> Path:
    """The path; that of a template if the path is a bare template name and no such file exists."""
    template = OWN_TEMPLATES / f"{path}.yaml"
    is_name = re.fullmatch(r"\w{1,100}", str(path)) is not None
    return template if is_name and not path.exists() and template.is_file() else path


def template_names() -> list[str]:
    return sorted(path.stem for path in OWN_TEMPLATES.glob("*.yaml"))


def data_script_names() -> list[str]:
    return sorted(path.stem for path in DATA_SCRIPTS.glob("*.py"))


def path_in_template(folder: Path, path: str, pipeline: Path) -> Path:
    """Return the file that a template in `folder` names by a relative path.

    A path that leads out of dagrl's own templates, such as ``../data/gsm8k/train.parquet``, is the user's data. It is
    relative to the folder of the pipeline file that extends the template, or to the working directory if the pipeline
    is a template of a wheel. In the repository, and if the file is there, it is relative to the template.
    """
    beside = folder / path
    if not path.startswith("../") or os.path.realpath(folder) != str(OWN_TEMPLATES) or beside.exists():
        return beside
    project = Path(os.path.realpath(pipeline)).parent
    if project == OWN_TEMPLATES:
        if not _INSTALLED.is_dir():
            return beside
        project = Path.cwd()
    return project / path.removeprefix("../")


def template_text(name: str) -> str:
    return (OWN_TEMPLATES / f"{name}.yaml").read_text(encoding="utf-8")


def template_description(name: str) -> str:
    """The first sentence of a template's comment."""
    lines = itertools.takewhile(lambda line: line.startswith("# "), template_text(name).splitlines())
    text = " ".join(line[2:].strip() for line in lines)
    return re.split(r"(?<=[^.\W])(?<!\bDr)\.(?: |$)|(?<=\))\.(?: |$)", text, maxsplit=1)[0]


def template_parents(name: str) -> list[str]:
    match = re.search(r"^extends: (.+?) *(?:#.*)?$", template_text(name), re.MULTILINE)
    return re.findall(r"[\w-]+", match[1]) if match else []


def setup_commands(templates: Sequence[str]) -> list[str]:
    """Commands that fetch the models and write the data of templates, and runs from whose weights they start.

    They are those of the last template whose comment has any, else those of the templates that they extend. A template
    that defines its model and data needs no such commands.
    """
    for name in reversed(templates):
        text = template_text(name)
        commands = [command for command in _SETUP.findall(text) if command.split()[:3] != [*_RUN, name]]
        if commands or set(_COMPLETE.findall(text)) == {"model", "data"}:
            return commands
        if commands := setup_commands(template_parents(name)):
            return commands
    return []


_RUN = ("dagrl", "run")
_COMPLETE = re.compile(r"^(model|data):", re.MULTILINE)
_SETUP = re.compile(r"^# {5}((?:pip|hf|dagrl data|dagrl run) .*)$", re.MULTILINE)
