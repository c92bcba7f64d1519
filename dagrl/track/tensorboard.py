"""TensorBoard event files under ``tensorboard/`` of the run folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dagrl.track.base import SampleTable, naming

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes each metric as a scalar, and the pipeline as text.

    Raises OSError, with a sentence that names the folder, where it cannot be written.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: SummaryWriter | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_step: int | None) -> None:
        """Open a new event file; it tells TensorBoard to forget the steps after `resumed_step`."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run_dir / "tensorboard"
        with naming(self._folder):
            first_step = 0 if resumed_step is None else resumed_step + 1
            self._writer = SummaryWriter(str(self._folder), purge_step=first_step)
            pipeline = yaml.safe_dump(dict(config), sort_keys=False)
            self._writer.add_text("pipeline", f"```yaml\n{pipeline}```", first_step)
            self._writer.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the scalars through to the file."""
        assert self._writer is not None, "log before start"
        with naming(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def samples(self, step: int, table: SampleTable) -> None:
        """Write a table as text."""
        assert self._writer is not None, "samples before start"
        with naming(self._folder):
            self._writer.add_text("val/samples", _markdown(table), step)
            self._writer.flush()

    def close(self, ok: bool) -> None:
        """Close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with naming(self._folder):
                writer.close()


def _markdown(table: SampleTable) -> str:
    """A table whose cells are one line each."""

    def line(cells: Iterable[Any]) -> str:
        texts = (str(cell).replace("|", "\\|").replace("\n", " ↵ ") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(table.columns), line("---" for _ in table.columns), *map(line, table.rows)])
