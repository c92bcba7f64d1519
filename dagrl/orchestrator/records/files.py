"""The files of a run's records: one JSON document for each node and step, and the columns that it names.

records/step_N/NODE.json the runs of a node: rows, columns by the hash of their content, metrics
records/columns/HASH.npz a column, stored once for all its readers records/pipelines/HASH.yaml the pipeline of the
recorded step records/states/step_N/ENGINE with ``keep_last``: the state of a trained engine after step N
records/kept.json with ``keep_last``: first steps of the segments that stay for good
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from dagrl.backends.registry import backends
from dagrl.data.batch import Batch
from dagrl.data.column_store import ColumnStore, StoredBlock
from dagrl.data.stats import Stat
from dagrl.orchestrator.folder.checkpoint import numbered_steps
from dagrl.tracking.base import replace_text
from dagrl.version import __version__

FOLDER = "records"
_KEPT = "kept.json"
_FORMAT = 1


class RecordError(ValueError):
    """A record is missing, damaged or has another format."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class ShardRows(_Document):
    """The rows of one shard."""

    shard: int
    rows: list[int]
    tokens: list[int]
    """Tokens of each row when the run began: dispatch balances them."""


class RecordedInputs(_Document):
    """The inputs of one run of a node."""

    order: int
    """Runs of a step, over all nodes, in the order of their starts."""
    shards: tuple[int, ...]
    round: int
    ends: bool
    """Whether it ends an update; True for other nodes."""
    rows: list[ShardRows]
    """The batch that the run may read, by shard."""
    sources: dict[str, list[StoredBlock]]
    """Task -> the blocks of its output that the run reads."""
    kl_weight: float | None = None
    """Only for an advantage node."""
    baselines: dict[str, float] = {}
    """Only for an advantage node with baselines of roles."""
    returned: tuple[int, ...] = ()
    """Groups of the batch that a buffer returned."""


class RecordedBlock(_Document):
    """Rows and columns returned by one worker."""

    worker: str
    block: StoredBlock


class RecordedOutputs(_Document):
    """The outputs of one run of a node."""

    blocks: list[RecordedBlock]
    metrics: dict[str, tuple[float, float, float, float, float]]
    """Statistics of the run, as the fields of `Stat`."""
    weights: dict[str, tuple[str, float]] = {}
    """After the last piece of an update: each tensor's digest and norm."""
    chunks: list[tuple[int, list[int]]] = []
    """Only for a rollout: server and groups of each call, in the order in which they were sent."""

    def stats(self) -> dict[str, Stat]:
        return {name: Stat(*fields) for name, fields in self.metrics.items()}


class RecordedRun(_Document):
    """One run of a node in a step. A node that works shard by shard has several."""

    inputs: RecordedInputs
    outputs: RecordedOutputs | None = None
    """None if the run of the pipeline ended before the node did."""


class NodeRecord(_Document):
    """All runs of a node in one step."""

    format: int = _FORMAT
    step: int
    node: str
    executor: str
    trains: bool
    pipeline: str
    """The pipeline's name in ``pipelines/``."""
    versions: dict[str, str]
    code: str
    """Hash of dagrl's sources and of the user's modules."""
    group_size: int
    runs: list[RecordedRun]


class Records:
    """The records of one run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self.columns = ColumnStore(self.columns_folder)

    @property
    def columns_folder(self) -> Path:
        return self.folder / "columns"

    def write(self, record: NodeRecord) -> None:
        path = self._path(record.step, record.node)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, record.model_dump_json())

    def read(self, step: int, node: str) -> NodeRecord:
        """The record of a node. Raises RecordError if there is none, or it cannot be read."""
        path = self._path(step, node)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise RecordError(self._why_missing(step, node)) from None
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror}") from error
        try:
            record = NodeRecord.model_validate_json(text)
        except ValidationError:
            raise RecordError(f"{path} holds something else than was written; replay another step") from None
        if record.format != _FORMAT:
            raise RecordError(f"{path} has format {record.format}, and this dagrl reads format {_FORMAT}")
        return record

    def write_pipeline(self, text: str) -> str:
        """Store a pipeline; returns its name. Raises OSError."""
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        path = self.pipeline(name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text, private=True)
        return name

    def pipeline(self, name: str) -> Path:
        return self.folder / "pipelines" / f"{name}.yaml"

    def state(self, step: int) -> Path:
        return self.folder / "states" / f"step_{step}"

    def states(self, engine: str) -> dict[int, Path]:
        """Step -> folder that holds the complete state of an engine after it."""
        return {
            step: folder
            for step, folder in numbered_steps(self.folder / "states")
            if (folder / engine).is_dir() and (folder / f"{engine}.done").is_file()
        }

    def saved_states(self) -> list[int]:
        return [step for step, _ in numbered_steps(self.folder / "states")]

    def segments(self) -> list[int]:
        """First steps of the existing segments: the step after a state, or step 1 from start weights."""
        return sorted({step + 1 for step in self.saved_states()} | set(self.steps()[:1]))

    def keep(self, segments: Sequence[int]) -> None:
        """Note the first steps of the segments that stay for good. Raises OSError."""
        replace_text(self.folder / _KEPT, json.dumps(segments))

    def kept(self) -> list[int]:
        """The steps written by `keep`. Raises OSError, or ValueError if the file has other content."""
        path = self.folder / _KEPT
        return [int(step) for step in json.loads(path.read_text())] if path.is_file() else []

    def steps(self) -> list[int]:
        return [step for step, _ in numbered_steps(self.folder)]

    def nodes(self, step: int) -> list[str]:
        return sorted(path.stem for path in (self.folder / f"step_{step}").glob("*.json"))

    def remove(self, steps: Sequence[int], states: Sequence[int] = ()) -> None:
        """Remove the records of steps and the states after steps, and all columns that no other record names."""
        for step in steps:
            shutil.rmtree(self.folder / f"step_{step}", ignore_errors=True)
        for step in states:
            shutil.rmtree(self.state(step), ignore_errors=True)
        if steps:
            self.columns.sweep(self._named_columns())

    def batch(self, blocks: Iterable[StoredBlock]) -> Batch | None:
        """The rows of some blocks, by row id, without duplicates; None without columns. Raises DamagedColumnError."""
        batches = [self.columns.get_block(block) for block in blocks if block.columns]
        if not batches:
            return None
        whole = Batch.concat(batches)
        # Blocks that several runs of a node read are repeated.
        return whole.take(np.unique(whole.rows, return_index=True)[1])

    def _named_columns(self) -> set[str]:
        needed: set[str] = set()
        for record in (self.read(step, node) for step in self.steps() for node in self.nodes(step)):
            for run in record.runs:
                blocks = [block for sources in run.inputs.sources.values() for block in sources]
                blocks += [stored.block for stored in run.outputs.blocks] if run.outputs else []
                for block in blocks:
                    needed |= {block.rows, *block.columns.values()}
        return needed

    def _path(self, step: int, node: str) -> Path:
        return self.folder / f"step_{step}" / f"{node}.json"

    def _why_missing(self, step: int, node: str) -> str:
        steps = self.steps()
        if not steps:
            return f"{self.folder.parent} has no records; set `run.record: [{node or 'update'}]` and run again"
        if step not in steps:
            return f"step {step} is not recorded; {self.folder} has {ranges(steps)}"
        known = ", ".join(self.nodes(step)) or "none"
        return f"`{node}` is not recorded in step {step}; recorded nodes: {known}"


def ranges(steps: Sequence[int]) -> str:
    """Format steps, for example ``steps 1-4, 7``."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    return ("step " if len(steps) == 1 else "steps ") + ", ".join("-".join(map(str, part)) for part in parts)


_PACKAGES = ("torch", "transformers", "numpy", "ray")
_DAGRL = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """The versions that results may depend on."""
    versions_of = {"dagrl": __version__, "python": platform.python_version()}
    of_backends = {name for backend in backends().values() for name in (*backend.requires, *backend.gpu_requires)}
    # A package such as megatron.core is distributed as megatron-core.
    for package in (*_PACKAGES, *sorted(name.replace(".", "-") for name in of_backends)):
        try:
            versions_of[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_of


def code_hash(modules: Path | None) -> str:
    """A hash of dagrl's sources, and of the Python files in the folder of the user's modules."""
    digest = hashlib.blake2b(digest_size=8)
    files = sorted(_DAGRL.rglob("*.py")) + (sorted(modules.glob("*.py")) if modules is not None else [])
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
