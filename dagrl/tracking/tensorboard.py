"""TensorBoard event files under ``tensorboard/`` in the run folder.

Uses TensorBoard's own writer: torch's takes seconds to import, and the driver does not need torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dagrl.tracking.base import SampleTable, naming

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Writes each metric as a scalar, and the pipeline as text.

    Raises OSError that names the folder if it cannot be written.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: EventFileWriter | None = None

    def start(self, run_dir: Path, config: Mapping[str, object], resumed_step: int | None) -> None:
        """Open a new event file, which tells TensorBoard to drop the steps after `resumed_step`."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = run_dir / "tensorboard"
        with naming(self._folder):
            first_step = 0 if resumed_step is None else resumed_step + 1
            self._writer = EventFileWriter(str(self._folder))
            self._add(first_step, session_log=SessionLog(status=SessionLog.START))
            pipeline = yaml.safe_dump(dict(config), sort_keys=False)
            self._add(first_step, summary=_text("pipeline", f"```yaml\n{pipeline}```"))
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self._writer is not None, "log before start"
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with naming(self._folder):
            self._add(step, summary=Summary(value=values))
            self._writer.flush()

    def samples(self, step: int, table: SampleTable) -> None:
        assert self._writer is not None, "samples before start"
        with naming(self._folder):
            self._add(step, summary=_text("val/samples", _markdown(table)))
            self._writer.flush()

    def close(self, ok: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with naming(self._folder):
                writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None
        self._writer.add_event(Event(step=step, wall_time=time.time(), **content))


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)])


def _markdown(table: SampleTable) -> str:
    """The table in Markdown, with newlines in cells replaced."""

    def line(cells: Iterable[Any]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("\n", " ↵ ") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(table.columns), line("---" for _ in table.columns), *map(line, table.rows)])
