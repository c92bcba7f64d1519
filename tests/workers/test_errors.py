"""How a failure looks on a terminal."""

from __future__ import annotations

from dagrl.workers.errors import RunError


def test_a_failure_names_node_worker_cause_and_hint() -> None:
    error = RunError("it broke", node="reward (step 3)", worker="host/0", hint="mend it", details="Traceback ...")
    error.log = "run/logs/failure.txt"
    assert error.lines() == [
        "  node    reward (step 3)",
        "  worker  host/0",
        "  cause   it broke",
        "  hint    mend it",
        "  details run/logs/failure.txt",
    ]
    assert str(error) == "it broke"


def test_engines_in_gpu_memory_are_listed_below_the_cause() -> None:
    error = RunError("out of memory", worker="actor/0", hint="mend it")
    error.memory = "group gpus: actor awake, generator asleep"
    assert error.lines() == [
        "  worker  actor/0",
        "  cause   out of memory",
        "  memory  group gpus: actor awake, generator asleep",
        "  hint    mend it",
    ]


def test_unknown_values_are_omitted_and_details_never_reach_the_terminal() -> None:
    assert RunError("it broke", details="Traceback ...").lines() == ["  cause   it broke"]
