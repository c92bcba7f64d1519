"""A worker's messages outlive the worker, and the way its stream ended is reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.orchestrator.cluster.session import RAY_VARIABLES

PROGRAM = """
import asyncio, os, sys, time
import numpy as np
import ray

from dagrl.data.batch import Batch, Column
from dagrl.orchestrator.groups.worker_handle import next_pair

output = sys.argv[1]


def gate(ending):
    return f"{output} {ending}"


class Teller:
    def tell(self, ending):
        for number in range(3):
            yield Batch(np.arange(9000), {"number": Column(np.full(9000, number))})
            yield number
        while not os.path.exists(gate(ending)):
            time.sleep(0.01)
        if ending == "a failure":
            raise ValueError("out of numbers")
        if ending == "a death between the two":
            yield None
        if ending != "the end":
            os._exit(1)

    def first_numbers(self, refs):
        return [int(batch["number"][0]) for batch in ray.get(refs)]


async def read(ref):
    return await ref


async def follow(ending):
    stream = ray.remote(Teller).remote().tell.options(num_returns="streaming").remote(ending)
    pairs, failure = [], None
    try:
        while (pair := await next_pair(stream, read)) is not None:
            pairs.append(pair)
            if len(pairs) == 3:
                open(gate(ending), "w").close()
    except ray.exceptions.RayError as error:
        failure = type(getattr(error, "cause", None) or error).__name__
    reader = ray.remote(Teller).remote()
    assert ray.get(reader.first_numbers.remote([columns for columns, _ in pairs]), timeout=120) == [0, 1, 2]
    with open(output, "a") as told:
        print(f"{ending}: {[number for _, number in pairs]} {failure}", file=told)


async def main():
    for ending in ("the end", "a failure", "a death between the two", "a death"):
        await follow(ending)


ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27, log_to_driver=False)
asyncio.run(main())
"""


@pytest.mark.slow
def test_columns_outlive_their_worker_and_the_end_of_a_stream_is_no_failure(tmp_path: Path) -> None:
    told = tmp_path / "told"
    environment = os.environ | RAY_VARIABLES
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, told], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told.read_text().splitlines() == [
        "the end: [0, 1, 2] None",
        "a failure: [0, 1, 2] ValueError",
        "a death between the two: [0, 1, 2] ActorDiedError",
        "a death: [0, 1, 2] ActorDiedError",
    ]
