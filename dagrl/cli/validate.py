"""`dagrl validate`."""

from __future__ import annotations

from dagrl.cli.parameters import Overrides, Pipeline


def validate(pipeline: Pipeline, overrides: Overrides = None) -> int:
    """Check a pipeline file, the files it names and the code it names.

    Prints a summary and exits 0, or prints every problem as FILE:LINE: place: what is wrong; what to do, and exits 2.
    Needs no GPU.
    """
    from dagrl.planner.fitting.sleep_policy import decide_sleep
    from dagrl.planner.fitting.warning import warn_of_memory
    from dagrl.validation import check_file
    from dagrl.validation.summary import summarize

    print(summarize(warn_of_memory(decide_sleep(check_file(pipeline, overrides or [])))), end="")
    return 0
