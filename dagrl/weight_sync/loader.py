"""Loads buckets into a model: with the model's own loader the first time, by replaying its copies afterwards."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dagrl.weight_sync.copies import Replay, as_bytes
from dagrl.weight_sync.copy_tracer import CopyRecorder, WeightComparer
from dagrl.weight_sync.manifest import BucketLayout, Manifest
from dagrl.weight_sync.protocol import shortened

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's loader: takes full tensors by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """The copies recorded for a manifest at its first use."""

    replays: tuple[Replay, ...] | None
    """One per bucket; None if the loader does more than copy, and must run every time."""
    constants: tuple[tuple[Tensor, float], ...]
    """Memory without a tensor, such as padding, with its value, which a sleep loses."""
    used: frozenset[str]
    """Names of the tensors that the model read; one rank of a server may not read all of them."""


class WeightLoader:
    """Loads weights into one model, or into one server rank's part of it, bucket by bucket and in order."""

    prefers_own_buffer = False
    """Whether buckets that another process shares are copied to a buffer of this one first."""

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]], load: Load) -> None:
        """`parameters` returns the model's parameters by name, whose memory must not move; `load` is its loader."""
        self._parameters, self._load = parameters, load
        self._recording: _Recording | None = None
        self.manifest: Manifest | None = None
        """Manifest of the last weights; the sender does not send it again."""
        self._recorder: CopyRecorder | None = None
        self._comparer: WeightComparer | None = None
        self._recorded: list[Replay] = []
        self._used: set[str] = set()

    @property
    def used(self) -> frozenset[str]:
        """Names of the tensors that the model read when the manifest was new."""
        assert self._recording is not None, "no weights have been loaded"
        return self._recording.used

    @property
    def replays(self) -> bool:
        """Whether the next weights are loaded without the model's own loader."""
        return self._recording is not None and self._recording.replays is not None

    def knows(self, manifest: Manifest) -> bool:
        """Whether weights with this manifest were loaded last."""
        return self._recording is not None and self.manifest is not None and manifest.digest == self.manifest.digest

    def begin(self, manifest: Manifest) -> None:
        if not self.knows(manifest):
            self._recording = None
        self.manifest = manifest
        parameters = self._parameters() if self._recording is None else {}
        constants = self._recording.constants if self._recording else [(weight, 0.0) for weight in parameters.values()]
        with torch.no_grad():
            # _foreach_zero_ rejects an empty list.
            if zeros := [as_bytes(tensor) for tensor, value in constants if value == 0]:
                torch._foreach_zero_(zeros)
            for tensor, value in constants:
                if value != 0:
                    tensor.fill_(value)
        if self._recording is None:
            self._recorder, self._recorded, self._used = CopyRecorder(parameters), [], set()

    def load(self, index: int, buffer: Tensor) -> None:
        """Load a bucket from `buffer`, uint8 [its bytes or more]; on a GPU, asynchronously on the current stream.

        Raises ValueError with the tensor's name if the model's loader fails.
        """
        assert self.manifest is not None, "load before begin"
        layout = self.manifest.buckets[index]
        if self._recorder is not None:
            self._recorder.watch(buffer)
            with self._recorder:
                self._run_loader(layout, buffer)
            copies, read = self._recorder.pop_copies()
            self._recorded.append(Replay(copies))
            self._used |= _names_at(read, layout)
            return
        assert self._recording is not None, "load after a failure"
        if self._recording.replays is not None:
            self._recording.replays[index].run(buffer)
        else:
            self._run_loader(layout, buffer)

    def end(self) -> None:
        """End after the last bucket. Raises ValueError if parameters of the model were not written."""
        assert self.manifest is not None, "end before begin"
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if moved := recorder.moved():
            raise ValueError(f"the model's loader replaces {shortened(moved)} instead of writing into its memory")
        if missed := recorder.missed():
            raise ValueError(
                f"the trainer sent no weights for parameters of the server's model: {shortened(missed)}; "
                "use the same model for both"
            )
        replays = None if recorder.obstacle or recorder.overwrites() else tuple(self._recorded)
        self._recording = _Recording(replays, tuple(recorder.constants()), frozenset(self._used))

    def begin_comparing(self) -> None:
        self._comparer = WeightComparer(self._parameters())

    def compare(self, index: int, buffer: Tensor) -> None:
        """Compare a bucket. Raises ValueError as `load` does."""
        assert self._comparer is not None and self.manifest is not None, "compare before begin_comparing"
        self._comparer.watch(buffer)
        with self._comparer:
            self._run_loader(self.manifest.buckets[index], buffer)

    def end_comparing(self) -> None:
        """End after the last bucket. Raises ValueError if the model's weights differ or were not compared entirely."""
        assert self._comparer is not None, "end_comparing before begin_comparing"
        comparer, self._comparer = self._comparer, None
        if differing := comparer.differing():
            worst = [f"{name} ({count} elements)" for name, count in differing.items()]
            raise ValueError(f"the server's weights differ from those sent, in {shortened(worst)}")
        if missed := comparer.missed():
            raise ValueError(f"parameters of the server's model were not compared entirely: {shortened(missed)}")

    def release_buffers(self) -> None:
        """Drop references to the buffers of the buckets, whose memory is about to be freed."""
        for replay in (self._recording.replays if self._recording else None) or ():
            replay.release_buffer()

    def reset(self) -> None:
        """Drop the state of an unfinished load, after a failure."""
        self._recorder = self._comparer = None
        self.release_buffers()

    def _run_loader(self, layout: BucketLayout, buffer: Tensor) -> None:
        current: list[str] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in layout.views(buffer):
                current[:] = [f"{name} {list(tensor.shape)}"]
                yield name, tensor

        try:
            with torch.no_grad():
                self._load(tensors())
        except Exception as error:
            # A model's loader can raise anything; the message has to name the tensor.
            where = current[0] if current else "any tensor"
            text = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}{f': {text}' if text else ''}"
            raise ValueError(f"the server's model could not load {where}: {reason}") from error


def _names_at(offsets: Iterable[int], layout: BucketLayout) -> set[str]:
    """Names of the tensors at these byte offsets."""
    begins = [tensor.offset for tensor in layout.tensors]
    return {layout.tensors[bisect.bisect_right(begins, offset) - 1].name for offset in offsets}
