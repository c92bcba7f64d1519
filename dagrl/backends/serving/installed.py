"""Checks that the library of a server is installed in the version that dagrl knows."""

from __future__ import annotations

import importlib.util

from dagrl.backends.serving.client import ServerError


def check_installed(title: str, package: str, version: str, remedy: str) -> None:
    """Raise ServerError if `package` is not installed in `version`, or one of its post-releases."""
    if importlib.util.find_spec(package) is None:
        raise ServerError(f"{title} is not installed; {remedy}")
    from importlib import metadata

    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        # A build of it may have another name.
        installed = metadata.version(metadata.packages_distributions()[package][0])
    if not f"{installed.partition('+')[0]}.".startswith(f"{version}."):
        raise ServerError(f"{title} {installed} is installed, but dagrl needs {version}; {remedy}")
