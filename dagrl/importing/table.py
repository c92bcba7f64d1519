"""Applies a framework's table of rules to the settings of a source.

A rule defines the translation of some keys: `to` copies a value to a key of the pipeline, `joint` computes from several
keys, `implied` and `refused` give the reason for writing nothing. A key without a rule is unknown; a key whose rule
writes nothing is implied.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from dagrl.importing.settings import Setting, Settings, Unresolved, why_unknown


class Status(StrEnum):
    """The outcome for a setting of the source."""

    TRANSLATED = "translated"
    DEFAULT = "default"
    """Not set by the source: the framework's default, written out."""
    IMPLIED = "implied"
    """Nothing to write, because the pipeline does the same without it."""
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Line:
    """The outcome of one setting."""

    status: Status
    key: str
    value: object = None
    place: str | None = None
    """``FILE:LINE``; None for a default of the framework."""
    targets: tuple[str, ...] = ()
    """Keys of the pipeline."""
    note: str = ""


_TEXTS = re.compile(r"name|data\.(train|val|val\.\w+)|.*\.(path|tokenizer|fn|dist_checkpointing_path)|model\..*")
"""Keys of the pipeline with a text, which may have an unknown part."""


_REQUIRED = (
    "model.path",
    "data.train",
    "data.prompts_per_step",
    "data.max_prompt_tokens",
    "nodes.rollout.sampling.max_new_tokens",
)
"""Keys that every pipeline of these frameworks has."""


def is_known(value: Any) -> bool:
    return value is not None and not isinstance(value, Unresolved)


Apply = Callable[["Translation"], None]


@dataclass(frozen=True)
class Rule:
    """A row of a framework's table."""

    keys: tuple[str, ...]
    """Keys of the source; ``*`` stands for any rest."""
    apply: Apply
    always: bool = False
    """Whether to apply it even if the source sets none of its keys, because it writes defaults."""

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(re.escape(key).replace(r"\*", ".*")) for key in self.keys)

    def matches(self, key: str) -> bool:
        return any(pattern.fullmatch(key) for pattern in self._patterns)


@dataclass(frozen=True)
class Framework:
    """A framework that pipelines can be imported from."""

    name: str
    version: str
    """The name in the report: ``verl 0.9``."""
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any]
    """The framework's own defaults of keys that rules read."""
    program: str = "(?!)"
    """Pattern of the module or file that a script calls; the following words are its settings."""
    sections: tuple[str, ...] = ()
    """Sections that identify its YAML: one of them is enough."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other prefixes of keys -> the prefixes in rules."""
    is_hydra: bool = False
    """Settings are Hydra's ``key=value``. Otherwise they are ``--key value`` in a script, and keys in a YAML."""

    def rule_of(self, key: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.matches(key)), None)


@dataclass
class Translation:
    """A pipeline under construction, and the outcome for each setting. Rules read and write it."""

    framework: Framework
    settings: Settings
    tree: dict[str, Any] = field(default_factory=dict)
    """Keys of the pipeline, dotted, with their values."""
    origins: dict[str, tuple[Setting, ...]] = field(default_factory=dict)
    """Key of the pipeline -> the settings it comes from; none for a default."""
    outcomes: dict[str, Line] = field(default_factory=dict)
    """Setting -> its outcome so far."""
    others: list[Line] = field(default_factory=list)
    """Defaults that are written out, and keys of the pipeline for the user to decide."""
    current: tuple[str, ...] = ()
    """Keys of the source for the current rule."""

    @property
    def lines(self) -> list[Line]:
        return [*self.others, *self.outcomes.values()]

    def given(self, key: str) -> bool:
        return key in self.settings

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: the source's, or the framework's default, or `default`."""
        if key in self.settings:
            return self.settings.by_key[key].value
        return self.framework.defaults.get(key, default)

    def number(self, key: str, default: Any = None) -> Any:
        """The value of a key if it is a number, else `default`."""
        value = self.get(key, default)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    def flag(self, key: str) -> bool:
        return self.get(key) is True

    def below(self, section: str) -> list[str]:
        """The keys of a section that the source sets."""
        return [setting.key for setting in self.settings if setting.key.startswith(f"{section}.")]

    def rest(self) -> list[str]:
        """The keys of the current rule that have no outcome yet."""
        return [key for key in self.current if key not in self.outcomes]

    def first(self, *keys: str) -> str | None:
        """The first of some keys that the source sets to a value other than null."""
        return next((key for key in keys if self.settings.value(key) is not None), None)

    def put(self, target: str, value: object) -> None:
        """Write a key of the pipeline without a setting of the source."""
        self.tree[target] = value

    def write(self, target: str, value: object, *keys: str, note: str = "") -> None:
        """Write a key of the pipeline, and record the settings among `keys` as translated, or else as a default."""
        keys = keys or self.current
        given = tuple(self.settings.by_key[key] for key in keys if key in self.settings)
        is_written = not isinstance(value, Unresolved) or _TEXTS.fullmatch(target) is not None
        if is_written:
            self.tree[target] = value.text if isinstance(value, Unresolved) else value
            self.origins[target] = given
        for setting in given:
            if isinstance(setting.value, Unresolved):
                self._record(Status.UNKNOWN, setting, why_unknown(setting.value.missing), target)
            elif is_written:
                self._record(Status.TRANSLATED, setting, note, target)
        if is_written and not given:
            note = note or f"default of {self.framework.version}"
            self.others.append(Line(Status.DEFAULT, keys[0] if keys else target, value, None, (target,), note))

    def drop(self, target: str, reason: str, status: Status = Status.IMPLIED) -> None:
        """Remove a key of the pipeline; its settings get `status` and `reason`."""
        self.tree.pop(target, None)
        self.others = [line for line in self.others if target not in line.targets]
        for setting in self.origins.pop(target, ()):
            line = self.outcomes.get(setting.key)
            if line is None or line.targets == (target,):
                self.outcomes.pop(setting.key, None)
                self._record(status, setting, reason)
            else:
                rest = tuple(kept for kept in line.targets if kept != target)
                self.outcomes[setting.key] = replace(line, targets=rest)

    def copy(
        self, key: str, target: str, default: object = None, *, above: float | None = None, note: str = ""
    ) -> None:
        """Write the value of a key, or its default: the framework's, or `default`. Without either, nothing is written.

        With `above`, only a number above it is written.
        """
        value = default if self.get(key) is None else self.get(key)
        if value is not None and (above is None or self.number(key, above) > above):
            self.write(target, value, key, note=note)

    def choose(self, key: str, target: str, names: Mapping[str, str], reason: str) -> None:
        """Write dagrl's name of a key's value, or refuse the key with `reason` if there is none."""
        value = self.get(key)
        if isinstance(value, Unresolved):
            self.write(target, value, key)
        elif isinstance(value, str) and names.get(value):
            self.write(target, names[value], key)
        else:
            self.refuse(reason, key)

    def refuse(self, reason: str, *keys: str) -> None:
        """Record settings as refused: they have no counterpart."""
        for key in keys:
            if key in self.settings:
                self._record(Status.REFUSED, self.settings.by_key[key], reason)

    def imply(self, reason: str, *keys: str) -> None:
        """Record settings as implied, unless they have an outcome: the pipeline does the same without them."""
        for key in keys:
            if key in self.settings and key not in self.outcomes:
                self._record(Status.IMPLIED, self.settings.by_key[key], reason)

    def note(self, key: str, target: str, reason: str, value: object = None) -> None:
        """Record a choice that the source leaves open for the user."""
        targets = (target,) if target else ()
        if setting := self.settings.by_key.get(key):
            self._record(Status.UNKNOWN, setting, reason, *targets)
        else:
            self.others.append(Line(Status.UNKNOWN, key, value, None, targets, reason))

    def _record(self, status: Status, setting: Setting, note: str, *targets: str) -> None:
        earlier = self.outcomes.get(setting.key)
        if earlier and earlier.status is status is Status.TRANSLATED:
            note = "; ".join(dict.fromkeys(filter(None, (earlier.note, note))))
            targets = tuple(dict.fromkeys((*earlier.targets, *targets)))
        self.outcomes[setting.key] = Line(status, setting.key, setting.value, setting.place, targets, note)


_WRONG_VALUES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""Raised for values of types that the source framework would also reject."""


def translate(framework: Framework, settings: Settings) -> Translation:
    settings = _without_aliases(framework, settings)
    translation = Translation(framework, settings)
    concerned: dict[int, list[str]] = {}
    for setting in settings:
        for index, rule in enumerate(framework.rules):
            if rule.matches(setting.key):
                concerned.setdefault(index, []).append(setting.key)
                break
        else:
            translation.note(setting.key, "", _hint(framework, setting.key))
    for index, rule in enumerate(framework.rules):
        keys = concerned.get(index, [])
        if keys or rule.always:
            exact = [key for key in rule.keys if "*" not in key]
            translation.current = tuple(dict.fromkeys([*keys, *exact])) if rule.always else tuple(keys)
            try:
                rule.apply(translation)
            except _WRONG_VALUES as error:
                why = f"{type(error).__name__}: {error}"
                for key in keys:
                    translation.note(
                        key, "", f"this value, or one it goes with, has a form that is not known here ({why})"
                    )
    translation.current = ()
    listed = {target for line in translation.lines if line.status is Status.UNKNOWN for target in line.targets}
    for target in _REQUIRED:
        known = translation.tree.get(target) is not None or any(
            key.startswith(f"{target}.") for key in translation.tree
        )
        if not known and target not in listed:
            translation.note(target, target, "the source does not set it, and a pipeline needs it")
    for keys in concerned.values():
        for key in keys:
            translation.imply("is off, as by default, or has no effect with the other settings", key)
    return translation


def _without_aliases(framework: Framework, settings: Settings) -> Settings:
    """The settings by the keys in rules."""

    def known(key: str) -> str:
        return next((new + key.removeprefix(old) for old, new in framework.aliases.items() if key.startswith(old)), key)

    return Settings.of(replace(setting, key=known(setting.key)) for setting in settings)


def _hint(framework: Framework, key: str) -> str:
    names = [name for rule in framework.rules for name in rule.keys if "*" not in name]
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.9)
    return f"no key of {framework.version} that dagrl knows" + (f"; did you mean `{near[0]}`?" if near else "")


def to(
    key: str,
    *targets: str,
    convert: Callable[[Any], object] = lambda value: value,
    write_default: bool = False,
    note: str = "",
) -> Rule:
    """Copy a key's value; with `write_default`, also the framework's default if the source does not set the key."""

    @joint(key, always=write_default)
    def rule(t: Translation) -> None:
        value = t.get(key)
        if is_known(value):
            value = convert(value)
        for target in targets if value is not None else ():
            t.write(target, value, key, note=note)

    return rule


def switch(key: str, target: str) -> Rule:
    """Write true for an enabled key."""
    return to(key, target, convert=lambda value: value is True or None)


def under(section: str, names: str) -> str:
    """Keys of a section, whose names are separated by spaces."""
    return " ".join(f"{section}.{name}" for name in names.split())


def joint(*keys: str, always: bool = False) -> Callable[[Apply], Rule]:
    """Make a function a rule that computes from several keys, which are separated by spaces."""
    return lambda apply: Rule(tuple(" ".join(keys).split()), apply, always)


def implied(reason: str, *keys: str) -> Rule:
    """Keys that need no counterpart, separated by spaces."""
    return joint(*keys)(lambda t: t.imply(reason, *t.current))


def refused(reason: str, *keys: str) -> Rule:
    """Keys without a counterpart; one that is null, false or empty changes nothing."""
    return refused_unless((False, "", {}, []), reason, *keys)


def refused_unless(value: object, reason: str, *keys: str) -> Rule:
    """Keys without a counterpart, except with one value (or one of a tuple of values), which is how dagrl works."""
    accepted = value if isinstance(value, tuple) else (value,)

    @joint(*keys)
    def rule(t: Translation) -> None:
        t.refuse(reason, *(key for key in t.current if t.get(key) is not None and t.get(key) not in accepted))

    return rule
