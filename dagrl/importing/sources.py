"""Reads a script or configuration of another framework, and detects the framework."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dagrl.importing.files import is_file
from dagrl.importing.registry import FRAMEWORKS
from dagrl.importing.script import read_script
from dagrl.importing.settings import (
    ImportProblem,
    Remark,
    Setting,
    Settings,
    Unresolved,
    Word,
    parse_scalar,
    why_unknown,
)
from dagrl.importing.yaml_source import read_yaml, resolved

_OWN_CONFIG = re.compile(r"ppo(_\w+)?_trainer(\.yaml)?")
"""verl's own configurations, whose values the tables have as defaults."""


@dataclass(frozen=True, slots=True)
class Source:
    """The settings of a file."""

    framework: str
    settings: Settings
    remarks: tuple[Remark, ...] = ()


def read_source(
    path: Path, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None, framework: str | None = None
) -> Source:
    """Read a file. ImportProblem if it cannot be read, or belongs to no known framework.

    Args:
        path: a shell script or a YAML file.
        arguments: the arguments that the script is called with, or settings ``KEY=VALUE`` in place of the file's.
        variables: variables of the script's environment.
        framework: the framework, in place of detection by the content.
    """
    variables = variables or {}
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path, arguments, variables, framework)
    return _read_shell(path, arguments, variables, framework)


def _read_yaml(path: Path, arguments: Sequence[str], variables: Mapping[str, str], framework: str | None) -> Source:
    settings = Settings.of([*_parents(path), *read_yaml(path)])
    for index, text in enumerate(arguments, start=1):
        _add_override(settings, Word(text, "command line", index))
    sections = {setting.key.split(".")[0] for setting in settings}
    name = framework or next(
        (name for name, candidate in FRAMEWORKS.items() if sections & set(candidate.sections)), None
    )
    if name is None:
        marks = ((name, candidate.sections) for name, candidate in FRAMEWORKS.items() if candidate.sections)
        known = "; ".join(f"{name} has {' or '.join(sections)}" for name, sections in marks)
        raise ImportProblem(f"{path}: belongs to no known framework ({known}); give --from NAME")
    if name == "roll" and not {"actor_infer", "student_infer"} & sections:
        raise ImportProblem(f"{path}: is no pipeline of ROLL with rollouts; see docs/offline.md for `sft` and `dpo`")
    return Source(name, Settings.of(resolved(list(settings), variables)))


def _parents(path: Path) -> list[Setting]:
    """The settings of files beside it that Hydra's ``defaults`` names, such as ``../config/traj_envs@_here_``."""
    settings: list[Setting] = []
    for setting in read_yaml(path):
        if not re.match(r"defaults(\.\d+)?(\.|$)", setting.key):
            continue
        for name in setting.value if isinstance(setting.value, list) else [setting.value]:
            parent = path.parent / f"{str(name).partition('@')[0]}.yaml"
            if isinstance(name, str) and is_file(parent) and parent.resolve() != path.resolve():
                settings += read_yaml(parent)
    return settings


def _read_shell(path: Path, arguments: Sequence[str], variables: Mapping[str, str], framework: str | None) -> Source:
    programs = re.compile("|".join(candidate.program for candidate in FRAMEWORKS.values()))
    script = read_script(path, programs, arguments, variables)
    calls = [call for words in script.commands if (call := _launch(words, framework)) is not None]
    # A function that runs its arguments is traced, and then its command.
    launches = [*{tuple(word.text for word in words): (name, words) for name, words in calls}.values()]
    if not launches:
        reasons = "".join(f"\n{remark.file}:{remark.line}: {remark.message}" for remark in script.remarks)
        raise ImportProblem(f"{path}: no call of verl, siiRL or slime found; give the launch script{reasons}")
    name, words = launches[-1]
    settings, remarks = Settings(), list(script.remarks)
    if len(launches) > 1:
        remarks.append(Remark(words[0].file, words[0].line, f"is the last of {len(launches)} calls, and the one read"))
    if FRAMEWORKS[name].is_hydra:
        _add_hydra(settings, words, path, variables, remarks)
    else:
        _add_arguments(settings, words, remarks)
    if not settings.by_key:
        raise ImportProblem(f"{path}: the call of {name} has no settings")
    return Source(name, settings, tuple(remarks))


def _launch(words: list[Word], framework: str | None) -> tuple[str, list[Word]] | None:
    """The framework that a command starts, and the command's words from the program's name on."""
    for index, word in enumerate(words):
        for name, candidate in FRAMEWORKS.items():
            has_settings = candidate.is_hydra or any(w.text.startswith("--") for w in words[index + 1 :])
            if has_settings and re.fullmatch(candidate.program, word.text.rpartition("/")[2]):
                return framework or name, words[index:]
    return None


def _add_hydra(
    settings: Settings, words: list[Word], path: Path, variables: Mapping[str, str], remarks: list[Remark]
) -> None:
    """Overrides of Hydra, after the keys of a configuration that ``--config-path`` and ``--config-name`` name."""
    options = {}
    for word, following in zip(words, [*words[1:], None], strict=True):
        option = re.fullmatch(r"--(config-path|config-name|config-dir)(?:=(.*))?", word.text)
        if option:
            options[option[1].replace("dir", "path")] = (option[2] or (following.text if following else ""), word)
    if "config-name" in options:
        name, word = options["config-name"]
        settings.add(Setting("--config-name", name.strip("'\""), word.file, word.line))
        folder = Path(options.get("config-path", ("", word))[0].strip("'\"") or ".")
        files = [base / folder / f"{name.removesuffix('.yaml')}.yaml" for base in (path.parent, Path())]
        if file := next((file for file in files if is_file(file)), None):
            for setting in resolved([*_parents(file), *read_yaml(file)], variables):
                if not setting.key.startswith(("defaults", "hydra.")):
                    settings.add(setting)
        elif "config-path" in options and not _OWN_CONFIG.fullmatch(name.strip("'\"")):
            remarks.append(Remark(word.file, word.line, f"{files[0]} is not here; the settings in it are missing"))
    for word in words[1:]:
        if not word.text.startswith("--") and not _add_override(settings, word) and word.missing:
            remarks.append(_not_read(word))


def _not_read(word: Word) -> Remark:
    """The remark for a word that may hold unknown settings."""
    text = " ".join(word.text.split())
    return Remark(word.file, word.line, f"{text} may hold settings, which are missing: {why_unknown(word.missing)}")


def _add_override(settings: Settings, word: Word) -> bool:
    """Add a setting ``key=value``, or remove one by ``~key``; returns whether the word is either."""
    match = re.fullmatch(r"(\+\+|\+|~)?([\w./@-]+)(?:=(.*))?", word.text.strip(), re.DOTALL)
    if not match or (match[3] is None and match[1] != "~"):
        return False
    if match[1] == "~":
        settings.remove(match[2])
        return True
    value = word.value if word.missing else parse_scalar(match[3])
    if isinstance(value, Unresolved):
        value = Unresolved(match[3], value.missing)
    for key, leaf in _leaves(match[2], value):
        settings.add(Setting(key, leaf, word.file, word.line))
    return True


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """The settings of ``key={a: 1, b: {c: 2}}``, which Hydra merges into the section."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _add_arguments(settings: Settings, words: list[Word], remarks: list[Remark]) -> None:
    """Arguments of argparse: ``--key value ...`` and ``--flag``."""
    program = words[0]
    if "async" in program.text:
        settings.add(Setting("train_async.py", True, program.file, program.line))
    index = 1
    while index < len(words):
        word = words[index]
        index += 1
        if not word.text.startswith("--") or word.text == "--":
            continue
        key, equals, text = word.text.partition("=")
        values = [Word(text, word.file, word.line, word.missing)] if equals else []
        while index < len(words) and not words[index].text.startswith("--"):
            values.append(words[index])
            index += 1
        while len(values) > 1 and values[-1].text in values[-1].missing:
            # Usually further arguments, as in `--rollout-batch-size 32 $EXTRA_ARGS`.
            remarks.append(_not_read(values.pop()))
        unknown = next((word.value for word in values if word.missing), None)
        parsed = [parse_scalar(word.text) for word in values]
        value = unknown if unknown is not None else True if not values else parsed[0] if len(values) == 1 else parsed
        settings.add(Setting(key, value, word.file, word.line))
