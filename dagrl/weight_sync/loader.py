"""A model's side of a weight sync: buckets go into it, by its own loader at first and by a recording of that later.

Nothing here knows where buckets come from; `taker` does.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dagrl.weight_sync.copy_tracer import CopyRecorder, WeightComparer
from dagrl.weight_sync.manifest import BucketLayout, Manifest
from dagrl.weight_sync.protocol import shortened
from dagrl.weight_sync.replay import Replay

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's loader: takes full tensors by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was learned when a manifest came for the first time."""

    replays: tuple[Replay, ...] | None
    """None where the loader does more than copying: it has to do it every time."""
    constants: tuple[tuple[Tensor, float], ...]
    """What no tensor is for, such as padding, and what it has to be: a server that has slept has lost it."""
    used: frozenset[str]
    """Names that the model has taken something of; on a server's rank not all of them."""


class WeightLoader:
    """Takes weights into one model, bucket by bucket and in order; a part of a server's model, or all of it."""

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]], load: Load) -> None:
        """`parameters` gives the model's by name, which stay where they are; `load` is called with some at a time."""
        self._parameters, self._load = parameters, load
        self._known: _Known | None = None
        self._manifest: Manifest | None = None
        self._recorder: CopyRecorder | None = None
        self._comparer: WeightComparer | None = None
        self._recorded: list[Replay] = []
        self._used: set[str] = set()

    @property
    def manifest(self) -> Manifest | None:
        """What the last weights came as; the same needs not to be told again."""
        return self._manifest

    @property
    def used(self) -> frozenset[str]:
        """Names that the model has taken something of, when they came for the first time."""
        assert self._known is not None, "nothing has come yet"
        return self._known.used

    @property
    def replays(self) -> bool:
        """Whether later weights are taken without the model's own loader."""
        return self._known is not None and self._known.replays is not None

    def knows(self, manifest: Manifest) -> bool:
        """Whether it has taken weights that came like this before."""
        return self._known is not None and self._manifest is not None and manifest.digest == self._manifest.digest

    def begin(self, manifest: Manifest) -> None:
        """All buckets of `manifest` come now."""
        if not self.knows(manifest):
            self._known = None
        self._manifest = manifest
        parameters = self._parameters() if self._known is None else {}
        constants = self._known.constants if self._known else [(each, 0.0) for each in parameters.values()]
        with torch.no_grad():
            # It refuses an empty list.
            if zeros := [tensor for tensor, value in constants if value == 0]:
                torch._foreach_zero_(zeros)
            for tensor, value in constants:
                if value != 0:
                    tensor.fill_(value)
        if self._known is None:
            self._recorder, self._recorded, self._used = CopyRecorder(parameters), [], set()

    def take(self, index: int, buffer: Tensor) -> None:
        """Take in a bucket, which `buffer` holds, uint8 [bytes or more], until this is done; queued, on a GPU.

        ValueError, naming the tensor, where the model's loader fails.
        """
        assert self._manifest is not None, "take before begin"
        layout = self._manifest.buckets[index]
        if self._recorder is not None:
            self._recorder.look_at(buffer)
            with self._recorder:
                self._load_by_itself(layout, buffer)
            copied, read = self._recorder.take_notes()
            self._recorded.append(Replay(copied))
            self._used |= _names_at(read, layout)
            return
        assert self._known is not None, "take after a failure"
        if self._known.replays is not None:
            self._known.replays[index].run(buffer)
        else:
            self._load_by_itself(layout, buffer)

    def end(self) -> None:
        """All buckets have come. ValueError where the model has parameters that nothing was written to."""
        assert self._manifest is not None, "end before begin"
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if moved := recorder.moved():
            raise ValueError(f"the model's loader replaces {shortened(moved)} instead of writing into its memory")
        if missed := recorder.missed():
            raise ValueError(
                f"the server's model has parameters that were not written wholly: {shortened(missed)}; the trainer's "
                "model has no tensors for them, and both must be the same"
            )
        replays = None if recorder.obstacle or recorder.overwrites() else tuple(self._recorded)
        self._known = _Known(replays, tuple(recorder.constants()), frozenset(self._used))

    def begin_comparing(self) -> None:
        """All buckets come once more, to be compared with what the model holds."""
        self._comparer = WeightComparer(self._parameters())

    def compare(self, index: int, buffer: Tensor) -> None:
        """Compare a bucket. ValueError as `take` has it."""
        assert self._comparer is not None and self._manifest is not None, "compare before begin_comparing"
        self._comparer.look_at(buffer)
        with self._comparer:
            self._load_by_itself(self._manifest.buckets[index], buffer)

    def end_comparing(self) -> None:
        """All buckets were compared. ValueError where the model holds anything else, or was not compared wholly."""
        assert self._comparer is not None, "end_comparing before begin_comparing"
        comparer, self._comparer = self._comparer, None
        if differing := comparer.differing():
            worst = [f"{name} ({count} elements)" for name, count in differing.items()]
            raise ValueError(f"the server holds other weights than were sent, in {shortened(worst)}")
        if missed := comparer.missed():
            raise ValueError(f"parameters of the server's model were not compared wholly: {shortened(missed)}")

    def let_go_of_buffers(self) -> None:
        """Forget the buffers that buckets came in, whose memory goes away."""
        for replay in (self._known.replays if self._known else None) or ():
            replay.let_go()

    def let_go(self) -> None:
        """Forget what was under way, after a failure."""
        self._recorder = self._comparer = None
        self.let_go_of_buffers()

    def _load_by_itself(self, layout: BucketLayout, buffer: Tensor) -> None:
        """Have the model's loader take a bucket."""
        under_way: list[str] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in layout.views(buffer):
                under_way[:] = [f"{name} {list(tensor.shape)}"]
                yield name, tensor

        try:
            with torch.no_grad():
                self._load(tensors())
        except Exception as error:
            # A loader of any model can fail in any way; whichever it is, the tensor is what has to be known.
            where = under_way[0] if under_way else "anything"
            raise ValueError(f"the server's model could not take {where}: {_told(error)}") from error


def _names_at(offsets: Iterable[int], layout: BucketLayout) -> set[str]:
    """Names of the tensors that lie at these bytes."""
    begins = [tensor.offset for tensor in layout.tensors]
    return {layout.tensors[bisect.bisect_right(begins, offset) - 1].name for offset in offsets}


def _told(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{f': {text}' if text else ''}"
