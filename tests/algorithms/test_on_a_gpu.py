"""Objectives on a GPU, without one: what is computed on, and that nothing waits for the device in between."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from fake_gpu import OBJECTIVES, tensors_of


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_stays_on_the_device_and_does_not_wait_for_it(name: str, elsewhere: ProcessPoolExecutor) -> None:
    loss, metrics = elsewhere.submit(tensors_of, name).result(timeout=300)
    assert loss == ("cuda", loss[1], (), True)
    assert {each[:3] for each in metrics} == {("cuda", torch.float64, (5,))}
