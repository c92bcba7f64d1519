"""Models by their names on the Hugging Face Hub and on ModelScope, in the caches of those libraries.

The small files (config, tokenizer) are fetched when a pipeline is loaded, the weights by `download`, before a run.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from dagrl.config.loading.published_configs import published_config
from dagrl.config.schema import Pipeline

_NAME = re.compile(r"(?:(hf|modelscope):)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_SMALL = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = (*_SMALL, "*.safetensors")
_UNUSED = ("*/*", "consolidated*")
"""Copies of the weights in other formats."""


class HubError(ValueError):
    """A model cannot be fetched."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """The name of a published model: ``ORG/NAME``, ``ORG/NAME@REVISION``, ``modelscope:ORG/NAME``."""

    hub: str
    name: str
    revision: str | None

    def __str__(self) -> str:
        hub = "" if self.hub == "hf" else f"{self.hub}:"
        return f"{hub}{self.name}{f'@{self.revision}' if self.revision else ''}"


def hub_model(text: str) -> HubModel | None:
    """Return the model that a text names; None for a text that can only be a path."""
    found = _NAME.fullmatch(text)
    if found is None or found[2].startswith("."):
        return None
    return HubModel(found[1] or "hf", found[2], found[3])


def locate(model: HubModel) -> tuple[Path, str]:
    """Return the folder of a model in the cache, and its name with the cached revision.

    Fetches config and tokenizer if they are not cached. If the hub cannot be reached, the folder of a known model has
    only a config.json, which is enough for a plan. Raises HubError.
    """
    try:
        folder = _fetch(model, _SMALL)
    except _UnreachableError as error:
        config = published_config(model.name)
        if config is None:
            raise HubError(f"{error}; connect this machine, or give the model's folder") from error
        return _folder_with(model, config), str(model)
    pinned = HubModel(model.hub, model.name, folder.name) if folder.parent.name == "snapshots" else model
    return folder, str(pinned)


def download(pipeline: Pipeline) -> bool:
    """Fetch the weights of the pipeline's models that come from a hub. Returns whether any do. Raises HubError.

    Files that are in the cache are not fetched again, unfinished ones are continued.
    """
    models = [pipeline.model, *(engine.model for engine in pipeline.engines.values() if engine.model)]
    named = [found for model in models if model.hub and (found := hub_model(model.hub))]
    for name in dict.fromkeys(named):
        try:
            _fetch(name, _WEIGHTS)
        except _UnreachableError as error:
            raise HubError(f"{error}; connect this machine, or copy the cache of another one") from error
    return bool(named)


class _UnreachableError(HubError):
    """The hub does not answer."""


def _fetch(model: HubModel, patterns: Sequence[str]) -> Path:
    return _fetch_from_modelscope(model, patterns) if model.hub == "modelscope" else _fetch_from_hf(model, patterns)


def _fetch_from_hf(model: HubModel, patterns: Sequence[str]) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(*, cached: bool) -> Path:
        return Path(
            snapshot_download(
                model.name,
                revision=model.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNUSED),
                local_files_only=cached,
            )
        )

    try:
        return fetch(cached=True)
    except HFValidationError as error:
        raise HubError(f"`{model}` is not the name of a model: {str(error).splitlines()[0]}") from error
    except LocalEntryNotFoundError:
        pass
    try:
        with _quiet() if patterns is _SMALL else nullcontext():
            return fetch(cached=False)
    except GatedRepoError as error:
        message = f"`{model}` is gated; accept its terms at https://huggingface.co/{model.name}, and set HF_TOKEN"
        raise HubError(message) from error
    except RevisionNotFoundError as error:
        raise HubError(f"`{model.name}` has no revision `{model.revision}` on the Hugging Face Hub") from error
    except RepositoryNotFoundError as error:
        what = f"there is no folder `{model}`, and no such model on the Hugging Face Hub"
        raise HubError(f"{what}; if it is private, set HF_TOKEN") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError) as error:
        what = f"there is no folder `{model}`; a model of that name is not in the cache, and the Hub cannot be reached"
        raise _UnreachableError(what) from error
    except OSError as error:
        raise HubError(f"cannot store `{model}`: {error}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without huggingface_hub's progress bars."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _fetch_from_modelscope(model: HubModel, patterns: Sequence[str]) -> Path:
    try:
        from modelscope.hub.snapshot_download import snapshot_download
        from modelscope_hub.errors import HubError as ModelScopeError
        from modelscope_hub.errors import NotExistError
    except ImportError as error:
        raise HubError(f"`{model}` needs the package modelscope; install it with `pip install modelscope`") from error
    # ModelScope retries for a while, and this module reports the outcome.
    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)

    def fetch(*, cached: bool) -> Path:
        options = {"allow_patterns": list(patterns), "ignore_patterns": list(_UNUSED), "local_files_only": cached}
        return Path(snapshot_download(model.name, revision=model.revision, **options))

    # ModelScope does not report whether the cache is complete, so only the small files are first looked for in it.
    failure: Exception | None = None
    for cached in (True, False) if patterns is _SMALL else (False, True):
        try:
            return fetch(cached=cached)
        except NotExistError as error:
            raise HubError(f"there is no folder `{model}`, and no such model on ModelScope") from error
        except (ModelScopeError, OSError, ValueError) as error:
            failure = error if not cached else failure
    first = str(failure).strip().partition("\n")[0]
    raise _UnreachableError(f"ModelScope cannot give `{model}`: {first}") from failure


def known_model(name: str) -> Path:
    """A folder with the sizes of a published model that dagrl knows. Raises HubError if it cannot be written."""
    config, model = published_config(name), hub_model(name)
    assert config is not None and model is not None, f"{name} is not known"
    return _folder_with(model, config)


def has_config_only(folder: Path) -> bool:
    """Whether the folder is that of a known model, whose files could not be fetched."""
    return folder.parent == _known_models()


def _known_models() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dagrl" / "models"


def _folder_with(model: HubModel, config: dict[str, object]) -> Path:
    """The folder with the config of a known model."""
    folder = _known_models() / model.name.replace("/", "--")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    except OSError as error:
        raise HubError(f"cannot store the config of `{model}`: {error}") from error
    return folder
