"""`dagrl validate`."""

from __future__ import annotations

from dagrl.cli.parameters import Overrides, Pipeline


def validate(pipeline: Pipeline, overrides: Overrides = None) -> int:
    """Check a pipeline file, the files it names and the code it names.

    Prints a summary and exits 0, or prints every problem as FILE:LINE: place: what is wrong; what to do, and exits 2.
    Needs no GPU.
    """
    from dagrl.validation import check_file
    from dagrl.validation.placing import place_engines
    from dagrl.validation.summary import summarize

    checked, _ = place_engines(check_file(pipeline, overrides or []))
    print(summarize(checked), end="")
    return 0
