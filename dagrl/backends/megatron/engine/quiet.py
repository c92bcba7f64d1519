"""Filters warnings of Megatron about optional libraries and known deprecations. Others pass."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    # Transformer Engine and Apex are optional; the engine reports a missing one itself.
    (UserWarning, r"Transformer Engine and Apex are not installed"),
    (UserWarning, r"Apex is not installed"),
    # Megatron takes its own default for a deprecated choice.
    (UserWarning, r"full scope is deprecated"),
    # Between two of Megatron's modules.
    (DeprecationWarning, r"The following imports from `dynamic_context.py`"),
    # Imported by the optimizer and not used.
    (UserWarning, r"MimoModelConfig is experimental"),
    # The optimizer reads gradients of its views of the weights, which are always None.
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf Tensor"),
    # Between Megatron's checkpoints and torch's.
    (FutureWarning, r"Please use DTensor instead"),
    # A docstring of Megatron's.
    (SyntaxWarning, r"invalid escape sequence"),
)

_LOG_RECORDS = (
    # Models are built by one function here, which can be changed for the successor.
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    # Advice about defaults that are intended here.
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


def hush() -> None:
    """Install the filters; calling it again has no effect."""
    for category, message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for logger, text in _LOG_RECORDS:
        drop_records(logger, text)


def drop_records(logger: str, text: str) -> None:
    logging.getLogger(logger).addFilter(lambda record: text not in record.getMessage())
