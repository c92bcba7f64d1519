"""Set-up of SGLang's processes before SGLang starts: log files, and termination with the worker.

Imported in fresh processes by multiprocessing, so it must be light.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from dagrl.backends.sglang.kernels import compile_ahead
from dagrl.imports import CODE_IS_NOT_RUN, UNUSED, import_transformers, without_packages


def run_scheduler(log_prefix: Path, fused_sampler: bool, *args: Any) -> None:
    """SGLang's scheduler, which holds a part of the model; `args` are SGLang's."""
    server_args, _ports, gpu, tensor = args[:4]
    # Indexed from the pipe's position, because 0.5.23 passes further ranks before these.
    pipe = next(index for index, argument in enumerate(args) if isinstance(argument, Connection))
    stage, copy = args[pipe - 2 : pipe]
    stages = f"-pp{stage}" if server_args.pp_size > 1 else ""
    copies = f"-dp{copy}" if copy is not None else ""
    _print_to(log_prefix.with_name(f"{log_prefix.name}{copies}{stages}-tp{tensor}.log"))
    import_transformers()
    with without_packages(*UNUSED):
        _end_with_parent()
        # In effect until the process ends, because SGLang imports lazily.
        sys.modules["megatron"] = None  # type: ignore[assignment]
        if gpu == server_args.base_gpu_id:
            compile_ahead(server_args)
        from sglang.srt.managers.scheduler import run_scheduler_process

        keep_code_out(trusted=server_args.trust_remote_code)
        if fused_sampler:
            from dagrl.backends.sglang.sampler import use_fused_sampler

            use_fused_sampler(server_args)

    run_scheduler_process(*args)


def keep_code_out(*, trusted: bool) -> None:
    """Prevent SGLang from running code of a model's folder in this process.

    It unpickles arbitrary objects in weights of an old PyTorch format, and imports the folder's Python files for an
    architecture that it does not know, without ``trust_remote_code``.
    """
    import torch
    from sglang.srt.model_loader import weight_utils
    from transformers import dynamic_module_utils

    weight_utils._load_pt_file = partial(torch.load, map_location="cpu", weights_only=True)
    if not trusted:
        dynamic_module_utils.get_class_in_module = _refuse_code


def _refuse_code(*_: object, **__: object) -> NoReturn:
    raise ValueError(CODE_IS_NOT_RUN)


@contextmanager
def without_megatron() -> Iterator[None]:
    """Context in which imports of Megatron fail, unless it is already imported.

    A debugging tool of SGLang imports Megatron if available, which takes many seconds and switches the memory saver to
    a mode in which memory of CUDA graphs cannot be released. Tensors pickled by such a process make receivers import
    Megatron, whose own pickles are then rejected as unsafe.
    """
    if "megatron" in sys.modules:
        yield
        return
    sys.modules["megatron"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["megatron"]


def _print_to(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when the parent dies; SGLang does so too, but only after slow imports."""
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)
