"""The library of a server is installed, in the version that dagrl knows."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata

import pytest

from dagrl.backends.serving.client import ServerError
from dagrl.backends.serving.installed import check_installed


def check_with(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`installed`: version by distribution; each has the package ``libx``."""

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"libx": list(installed)})
    check_installed("LibX", "libx", "0.5.17", "install it with `pip`")


@pytest.mark.parametrize(
    ("installed", "fault"),
    [
        ({}, "LibX is not installed; install it with `pip`"),
        ({"libx": "0.5.23"}, "LibX 0.5.23 is installed, but dagrl needs 0.5.17; install it with `pip`"),
        ({"libx": "0.5.170"}, "LibX 0.5.170 is installed, but dagrl needs 0.5.17"),
        ({"libx-cpu": "0.5.1+cpu"}, "LibX 0.5.1+cpu is installed, but dagrl needs 0.5.17"),
    ],
)
def test_another_version_or_none_is_told_with_the_remedy(installed, fault, monkeypatch) -> None:
    with pytest.raises(ServerError, match=re.escape(fault)):
        check_with(installed, monkeypatch)


@pytest.mark.parametrize("installed", [{"libx": "0.5.17"}, {"libx": "0.5.17.post1"}, {"libx-cpu": "0.5.17+cpu"}])
def test_builds_of_the_right_version_are_taken(installed, monkeypatch) -> None:
    check_with(installed, monkeypatch)
