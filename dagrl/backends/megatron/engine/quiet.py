"""Silences what megatron says about libraries that it can do without. Everything else it warns of stays heard."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    # Transformer Engine and Apex are choices of the machine; the engine itself says when it lacks one.
    (UserWarning, r"Transformer Engine and Apex are not installed"),
    (UserWarning, r"Apex is not installed"),
    # Megatron takes its own default for a deprecated choice.
    (UserWarning, r"full scope is deprecated"),
    # Between two of its own modules.
    (DeprecationWarning, r"The following imports from `dynamic_context.py`"),
    # Imported by the optimizer and not used.
    (UserWarning, r"MimoModelConfig is experimental"),
    # The optimizer looks at the gradients of its views of the weights, which have none.
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf Tensor"),
    # Folders are converted in one process, which is what it says it will assume.
    (UserWarning, r"torch\.distributed is disabled, unavailable or uninitialized"),
    # A docstring of megatron's that newer Pythons complain about when they compile it.
    (SyntaxWarning, r"invalid escape sequence"),
)

_LOG_RECORDS = (
    # Model construction stands behind one function here, ready for the successor.
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    # Two pieces of advice to callers who want something else than the default, which is what is wanted here.
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


def hush() -> None:
    """Filter the warnings and log records above, from now on. Calling it again changes nothing."""
    for category, message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    for logger, text in _LOG_RECORDS:
        logging.getLogger(logger).addFilter(Without(text))


class Without(logging.Filter):
    """Drops the records that contain a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is kept."""
        return self._text not in record.getMessage()
