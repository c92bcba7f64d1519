"""`dagrl validate`."""

from __future__ import annotations

from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, Only, Overrides, Pipeline, parse_part, print_json
from dagrl.config.errors import PipelineError


def validate(pipeline: Pipeline, overrides: Overrides = None, only: Only = None, as_json: AsJson = False) -> int:
    """Check a pipeline file, the files it names and the code it names.

    Prints a summary and exits 0, or prints every problem as FILE:LINE: place: what is wrong; what to do, and exits 2.
    Needs no GPU.

    Examples:
        dagrl validate pipeline.yaml
        dagrl validate pipeline.yaml run.steps=10
        dagrl validate tiny_grpo --json
        dagrl validate pipeline.yaml --only advantage,update
    """
    from dagrl.graph.cut import PartError
    from dagrl.validation.prepare import prepare
    from dagrl.validation.summary import as_values, summarize

    part = parse_part(only)
    try:
        with exit_on("validate", PartError):
            checked = prepare(pipeline, overrides or [], part=part)
    except PipelineError as error:
        if not as_json:
            raise
        problems = [problem.as_values() for problem in error.problems]
        print_json({"file": str(pipeline), "valid": False, "problems": problems})
        return 2
    if as_json:
        print_json(as_values(checked))
    else:
        print(summarize(checked), end="")
    return 0
