"""Data sets of the Hugging Face Hub: downloaded by `datasets`, or read over the network a row group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config.errors import suggest
from dagrl.config.loading.prompt_files import PromptFile
from dagrl.config.schema import SourceSpec
from dagrl.data.sources.parts import ParquetPart, Part, part_of

if TYPE_CHECKING:
    from datasets import DatasetBuilder


def parts_of_hub(spec: SourceSpec) -> list[Part]:
    """The files of a data set's split. Raises ValueError if it cannot be had."""
    builder, split = builder_of(spec)
    with _telling(spec):
        if spec.streamed:
            return list(_remote_parts(spec, builder, split))
        builder.download_and_prepare()
        files = builder.as_dataset(split=split).cache_files
    return [part_of(PromptFile(Path(each["filename"]), "arrow")) for each in files]


def builder_of(spec: SourceSpec) -> tuple[DatasetBuilder, str]:
    """The description of a data set, without its rows, and the split. Raises ValueError if it does not exist."""
    import datasets

    assert spec.hub is not None
    name, _, revision = spec.hub.partition("@")
    with _telling(spec):
        builder = datasets.load_dataset_builder(name, spec.name, revision=revision or None)
    split = spec.split or spec.usual_split
    known = [str(each) for each in builder.info.splits or builder.config.data_files or ()]
    if known and split not in known:
        raise ValueError(f"{spec.title} has no split `{split}`; {suggest(split, known)}")
    return builder, split


def _remote_parts(spec: SourceSpec, builder: DatasetBuilder, split: str) -> Iterator[Part]:
    from fsspec.core import url_to_fs

    for url in builder.config.data_files[split] if builder.config.data_files else ():
        if not url.endswith(".parquet"):
            raise ValueError(f"{spec.title} has other files than parquet ({url}); set `streamed: false`")
        files, path = url_to_fs(url)
        yield ParquetPart(PromptFile(Path(url), "parquet"), files.open(path))


@contextmanager
def _telling(spec: SourceSpec) -> Iterator[None]:
    """Raise ValueError with a sentence for the errors of `datasets`."""
    import datasets
    import httpx

    try:
        yield
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ValueError(
            f"cannot load {spec.title} from the Hugging Face Hub: {reason}; check name and network"
        ) from error
