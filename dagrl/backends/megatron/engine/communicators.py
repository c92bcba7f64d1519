"""Process groups whose communicators can be destroyed and created again, while the group objects stay.

NCCL holds hundreds of MiB of device memory per communicator until it is destroyed. Megatron keeps references to process
groups in many places, so here a group is a thin wrapper around another one, which is shut down and created again.
"""

from __future__ import annotations

import datetime
import functools
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend as Communicators
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import Backend, PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import GroupName

Tensors = Sequence[torch.Tensor]


class SingleRankCollectives:
    """Mixin before a ProcessGroup class, which then only handles point-to-point operations."""

    def allreduce(self, tensors: Tensors, opts: object) -> dist.Work:
        return _done(opts)

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: object = None) -> dist.Work:
        return _done(opts)

    def _allgather_base(self, output: torch.Tensor, mine: torch.Tensor, opts: object = None) -> dist.Work:
        return _copied([output], [mine], opts)

    _reduce_scatter_base = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Tensors, mine: Tensors, opts: object = None) -> dist.Work:
        return _copied(outputs, mine, opts)

    reduce_scatter_tensor_coalesced = alltoall = allgather_into_tensor_coalesced

    def alltoall_base(
        self, output: torch.Tensor, mine: torch.Tensor, output_sizes: object, sizes: object, opts: object = None
    ) -> dist.Work:
        return _copied([output], [mine], opts)

    def allgather(self, outputs: Sequence[Tensors], mine: Tensors, opts: object = None) -> dist.Work:
        return _copied([output for (output,) in outputs], mine, opts)

    gather = allgather

    def reduce_scatter(self, outputs: Tensors, mine: Sequence[Tensors], opts: object = None) -> dist.Work:
        return _copied(outputs, [tensor for (tensor,) in mine], opts)

    scatter = reduce_scatter

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations are immediate."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return _done(None)


def _copied(outputs: Tensors, inputs: Tensors, opts: object) -> dist.Work:
    for output, tensor in zip(outputs, inputs, strict=True):
        # The output is often a part of a buffer that is gathered in place.
        if output.data_ptr() != tensor.data_ptr():
            output.view(-1).copy_(tensor.reshape(-1))
    return _done(opts)


def _done(opts: object) -> dist.Work:
    """A finished work; on a GPU the copies are queued on the current stream, which is the one that waits."""
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("PREMUL_SUM, which only Megatron's FSDP uses, is not supported for one rank")
    over: torch.futures.Future[None] = torch.futures.Future()
    over.set_result(None)
    return _distributed_c10d._create_work_from_future(over)  # type: ignore[attr-defined]


Opened = tuple[str, ProcessGroup.BackendType, Communicators]
"""Device type of a backend, its kind, and the backend."""
type _Make = Callable[[_DistributedBackendOptions, Store, dist.ProcessGroupNCCL.Options | None], Opened]

_PREFIX = "reloadable_"

_DELEGATED = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather"),
    *("monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send", "_start_coalescing", "_end_coalescing"),
    *("name", "set_timeout", "_backend_id", "_enable_collectives_timing", "_get_backend", "_get_backend_name"),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group", "_has_hooks"),
    *("_register_on_completion_hook", "_wait_for_pending_works"),
)

_groups: list[ReloadableProcessGroup] = []
"""The groups of this process in order of creation, which is the same on all ranks that share two of them."""


def reloadable(backend: str) -> str:
    """The name of a torch.distributed backend like `backend` (``nccl`` or ``gloo``), whose groups can be reloaded."""
    name = _PREFIX + backend
    if name not in Backend.backend_list:
        device, make = {"nccl": ("cuda", _nccl), "gloo": ("cpu", _gloo)}[backend]
        Backend.register_backend(name, functools.partial(_group, make), extended_api=True, devices=[device])
        _batch_point_to_point_through_shells()
    return name


class ReloadableProcessGroup(ProcessGroup):
    """A process group whose communicators can be closed and opened. Created by torch for a backend of `reloadable`."""

    def __init__(
        self, make: _Make, options: _DistributedBackendOptions, backend_options: dist.ProcessGroupNCCL.Options | None
    ) -> None:
        # torch's stubs only have a constructor with a store, which does not work for subclasses.
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._make, self._options, self._backend_options = make, options, backend_options
        self._times_opened = 0
        self._labels: dict[str, str] = {}
        self._inner: ProcessGroup | None = None
        self.open()
        _groups.append(self)

    @property
    def inner(self) -> ProcessGroup:
        """The wrapped group. Raises RuntimeError while it is closed."""
        if self._inner is None:
            raise RuntimeError("the engine sleeps and its communicators are closed; call wake() first")
        return self._inner

    def open(self) -> None:
        """Create the inner group. NCCL connects it at first use."""
        assert self._inner is None, "the group is open"
        # A new prefix, because keys of an earlier rendezvous would answer for this one.
        store = PrefixStore(f"life_{self._times_opened}/", self._options.store)
        self._times_opened += 1
        device, kind, backend = self._make(self._options, store, self._backend_options)
        inner = ProcessGroup(store, self._options.group_rank, self._options.group_size)
        inner._set_default_backend(kind)
        inner._register_backend(torch.device(device), kind, backend)
        backend._set_sequence_number_for_group()
        for setter, label in self._labels.items():
            getattr(inner, setter)(label)
        self._inner = inner

    def close(self) -> None:
        """Destroy the communicators once they are idle, on all ranks of the group. Does nothing if closed."""
        if self._inner is not None:
            self._inner.shutdown()
            self._inner = None

    def shutdown(self) -> None:
        self.close()
        _groups.remove(self)

    def abort(self) -> None:
        """End the group permanently without waiting for other ranks."""
        if self._inner is not None:
            self._inner.abort()
            self._inner = None
        _groups.remove(self)

    def get_group_store(self) -> Store:
        return self._options.store

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _set_group_name(self, name: GroupName) -> None:
        super()._set_group_name(name)
        self._label("_set_group_name", name)

    def _set_group_desc(self, description: str) -> None:
        super()._set_group_desc(description)
        self._label("_set_group_desc", description)

    def _label(self, setter: str, label: str) -> None:
        self._labels[setter] = label
        getattr(self.inner, setter)(label)


# torch's stubs overload collectives for single tensors too.
class SingleRankProcessGroup(SingleRankCollectives, ReloadableProcessGroup):  # type: ignore[misc]
    """A group of one rank, which needs no communicator."""


def _group(
    make: _Make, options: _DistributedBackendOptions, backend_options: dist.ProcessGroupNCCL.Options | None
) -> ReloadableProcessGroup:
    kind = SingleRankProcessGroup if options.group_size == 1 else ReloadableProcessGroup
    return kind(make, options, backend_options)


def _delegate(name: str) -> Callable[..., object]:
    def method(self: ReloadableProcessGroup, *args: object, **kwargs: object) -> object:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


for _name in _DELEGATED:
    setattr(ReloadableProcessGroup, _name, _delegate(_name))


def close_all(timeout_s: float) -> None:
    """Destroy the communicators of all reloadable groups of this process. Collective.

    No collective may be running. Raises TimeoutError if the other ranks do not join in time.
    """
    if not _groups:
        return
    _meet(timeout_s)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    failures: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def close(group: ReloadableProcessGroup) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            group.close()
        except RuntimeError as error:
            failures.append(error)

    # Concurrently, because each one waits for its other ranks and its watchdog, dozens of milliseconds. A thread that
    # does not return cannot be stopped, and is left behind.
    deadline = time.monotonic() + timeout_s
    closing = [threading.Thread(target=close, args=(group,), daemon=True) for group in _shared_groups()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in closing):
        raise TimeoutError(f"the communicators were not closed within {timeout_s:.0f} s: a rank has ended or hangs")
    if failures:
        raise failures[0]


def open_all() -> None:
    """Undo `close_all`. Collective; NCCL connects each communicator at first use."""
    for group in _shared_groups():
        group.open()


def _shared_groups() -> list[ReloadableProcessGroup]:
    """Groups of more than one rank; others have no connections."""
    return [group for group in _groups if group.size() > 1]


def _meet(timeout_s: float) -> None:
    """Wait for all ranks through the store, because a barrier might create a communicator."""
    store, ranks = _groups[0].get_group_store(), dist.get_world_size()
    key = f"closing_{_groups[0]._times_opened}"
    if store.add(key, 1) == ranks:
        store.set(f"{key}_all", "")
    try:
        store.wait([f"{key}_all"], datetime.timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"only {store.add(key, 0)} of {ranks} ranks went to sleep within {timeout_s:.0f} s; check the other ranks"
        ) from error


def _nccl(
    options: _DistributedBackendOptions, store: Store, backend_options: dist.ProcessGroupNCCL.Options | None
) -> Opened:
    own = backend_options or dist.ProcessGroupNCCL.Options()
    own._timeout = options.timeout
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = GroupName(options.group_id)
    backend = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, own)
    return "cuda", ProcessGroup.BackendType.NCCL, backend


def _gloo(options: _DistributedBackendOptions, store: Store, backend_options: object) -> Opened:
    backend = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return "cpu", ProcessGroup.BackendType.GLOO, backend


def _batch_point_to_point_through_shells() -> None:
    """Patch torch's ``batch_isend_irecv``, which does not batch in groups of a subclass.

    Two ranks that each send before they receive would then deadlock with NCCL. Megatron and Transformer Engine look the
    function up in ``torch.distributed`` at each call.
    """
    batch = dist.batch_isend_irecv

    @functools.wraps(batch)
    def through_shells(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        return batch([_with_inner_group(operation) for operation in p2p_op_list])

    dist.batch_isend_irecv = through_shells


def _with_inner_group(operation: dist.P2POp) -> dist.P2POp:
    if not isinstance(operation.group, ReloadableProcessGroup):
        return operation
    # The operation already has the peer's rank in the group; the constructor would look the group up by name.
    inner = object.__new__(dist.P2POp)
    vars(inner).update(vars(operation), group=operation.group.inner)
    return inner
