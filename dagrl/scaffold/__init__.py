"""Writes the first files of a project that extends templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dagrl.config.errors import suggest
from dagrl.config.loading.extends import read_with_parents
from dagrl.resources import OWN_TEMPLATES, PAGES, setup_commands, template_names

_FILES = Path(__file__).with_name("files")
_PIPELINE = "pipeline.yaml"
_REWARD_FILES = ("rewards.py", "test_rewards.py")
_OTHERS = {"README.md": "README.md", ".gitignore": "gitignore"}
_REPLACED = ("exact", "math")
"""Built-in rewards that the project's own reward replaces."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The files of a new project."""

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    """Files that were there before, and are unchanged."""


def scaffold(folder: Path, templates: Sequence[str]) -> Scaffold:
    """Write a project into a folder, which is made if it does not exist. No file is overwritten.

    ValueError if a template does not exist, or if the folder has a pipeline or a reward module; OSError.
    """
    for name in templates:
        if name not in template_names():
            raise ValueError(f"there is no template `{name}`; {suggest(name, template_names())}")
    nodes = _nodes(templates)
    if not nodes:
        raise ValueError(f"`{templates[-1]}` is merged over a recipe; add one: --template grpo --template tiny")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-") or "project"
    rewards = [node for node, options in nodes.items() if options.get("fn") in _REPLACED]
    values = {
        "name": name,
        "template": templates[0],
        "extends": templates[0] if len(templates) == 1 else f"[{', '.join(templates)}]",
        "nodes": _reward_lines(rewards),
        "reward": "`rewards.py` has its reward, and `pytest` tests that.\n" if rewards else "",
        "pages": str(PAGES),
        "setup": "".join(f"    {command}\n" for command in setup_commands(templates)),
    }
    own = [_PIPELINE, *(_REWARD_FILES if rewards else ())]
    for file in own:
        if (folder / file).exists():
            raise ValueError(f"{folder / file} exists, and nothing is overwritten; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    sources = {file: file for file in own} | _OTHERS
    kept = tuple(folder / file for file in sources if (folder / file).exists())
    written = tuple(folder / file for file in sources if folder / file not in kept)
    for path in written:
        text = (_FILES / sources[path.name]).read_text(encoding="utf-8")
        with path.open("x", encoding="utf-8") as file:
            file.write(text if path.suffix == ".py" else Template(text).substitute(values))
    return Scaffold(written, kept)


def _reward_lines(rewards: Sequence[str]) -> str:
    lines = [f'  {node}: {{fn: "rewards:score"}}' for node in rewards]
    return "\n".join(["nodes:", *lines, ""]) if lines else ""


def _nodes(templates: Sequence[str]) -> dict[str, dict[str, object]]:
    """The nodes that the templates make together; none if all of them are setups."""
    nodes: dict[str, dict[str, object]] = {}
    whole = False
    for name in templates:
        tree = read_with_parents(OWN_TEMPLATES / f"{name}.yaml").tree
        sections = {node: options for node, options in tree.get("nodes", {}).items() if isinstance(options, dict)}
        whole |= any("op" in options for options in sections.values())
        for node, options in sections.items():
            nodes[node] = nodes.get(node, {}) | options
    return nodes if whole else {}
