"""Which nodes can be recorded."""

import pytest

from dagrl.config.errors import PipelineError
from dagrl.validation import check_file

RUN = "run: {steps: 10}"


@pytest.mark.parametrize("record", ["[update, rewad]", "{nodes: [rewad], keep_last: 2}"])
def test_unknown_nodes_are_reported(project, record: str) -> None:
    path = project.pipeline((RUN, f"run: {{steps: 10, record: {record}}} #!"))
    project.assert_problem(path, "run.record", "unknown-node")


def test_a_list_keeps_every_step_and_a_ring_the_last(project) -> None:
    path = project.folder / "p.yaml"
    every = check_file(path, ["run.record=[update]"]).loaded.pipeline.run.recorded
    ring = check_file(path, ["run.record={nodes: [update, ref], keep_last: 2, keep_on: [alarm]}"])
    last = ring.loaded.pipeline.run.recorded
    assert every is not None and (every.nodes, every.keep_last) == (("update",), None)
    assert last is not None and (last.nodes, last.keep_last, last.keep_on) == (("update", "ref"), 2, ("alarm",))
    assert check_file(path).loaded.pipeline.run.recorded is None


@pytest.mark.parametrize(
    "record", ["[]", "{keep_last: 2}", "{nodes: [update], keep_last: 0}", "{nodes: [update], on: a}"]
)
def test_malformed_records_are_reported(project, record: str) -> None:
    path = project.pipeline((RUN, f"run: {{steps: 10, record: {record}}}"))
    with pytest.raises(PipelineError, match=r"run\.record"):
        check_file(path)
