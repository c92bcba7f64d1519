"""Shared code of the scripts in data_preprocess/: a script describes a data set, and `run` writes its files."""

from dagrl.data.prepare.command import run
from dagrl.data.prepare.dataset import (
    BOXED_INSTRUCTION,
    QUESTION_INFO,
    DataSet,
    Drop,
    Field,
    Original,
    Record,
    answer_text,
    asked,
    last_boxed,
)
from dagrl.data.prepare.originals import usual_files

__all__ = [
    "BOXED_INSTRUCTION",
    "QUESTION_INFO",
    "DataSet",
    "Drop",
    "Field",
    "Original",
    "Record",
    "answer_text",
    "asked",
    "last_boxed",
    "run",
    "usual_files",
]
