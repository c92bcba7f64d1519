"""What the scripts of data_preprocess/ share: a data set is described in a few lines, `run` does the rest."""

from prepare.answers import BOXED_INSTRUCTION, answer_text, asked, last_boxed
from prepare.command import run
from prepare.dataset import QUESTION_INFO, DataSet, Drop, Field, Original, Record
from prepare.originals import usual_files

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
