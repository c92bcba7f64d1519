"""What the scripts of data_preprocess/ share: a data set is described in a few lines, `run` does the rest."""

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
