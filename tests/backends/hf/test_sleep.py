"""The embedded generator leaves its device's memory, and is the same when it comes back."""

from collections.abc import Callable

import pytest
import torch

from dagrl.backends.base import Completion
from dagrl.backends.hf.engine import HfEngine
from dagrl.backends.runtime.device_memory import storages_of
from dagrl.config.residency import Residency
from dagrl.config.schema import ModelSpec, SamplingSpec

Build = Callable[..., HfEngine]
Complete = Callable[..., list[Completion]]

PROMPTS = [[3, 13, 5, 14], [7], [8, 14]]
SAMPLING = SamplingSpec(temperature=1.5, max_new_tokens=8)


def held(engine: HfEngine) -> int:
    return sum(storage.nbytes() for storage in storages_of(engine._model.parameters()).values())


def said(completions: list[Completion]) -> list[tuple[list[int], list[float], int]]:
    return [(each.tokens.tolist(), each.logprobs.tolist(), each.policy_version) for each in completions]


@pytest.mark.parametrize("stop", [Residency.ASLEEP, Residency.WEIGHTS])
def test_an_engine_on_start_weights_keeps_them_while_it_sleeps(
    tied_model: ModelSpec, build_engine: Build, complete: Complete, stop: Residency
) -> None:
    engine = build_engine(tied_model)
    before, size = said(complete(engine, PROMPTS, SAMPLING)), held(engine)
    for _ in range(2):
        engine.sleep(Residency.WEIGHTS)
        assert held(engine) == size > 0
        engine.sleep(stop)
        assert held(engine) == (0 if stop is Residency.ASLEEP else size)
        engine.wake(Residency.WEIGHTS)
        engine.wake(Residency.AWAKE)
        assert said(complete(engine, PROMPTS, SAMPLING)) == before


def test_a_follower_comes_back_without_weights_and_takes_new_ones(
    model: ModelSpec, build_engine: Build, complete: Complete
) -> None:
    start = build_engine(model)
    weights = [(name, tensor.clone()) for name, tensor in start._model.state_dict().items()]
    engine = build_engine(model, weights_from="actor")
    engine.load_weights(iter([weights]), version=3)
    before = said(complete(engine, PROMPTS, SAMPLING))
    engine.sleep(Residency.ASLEEP)
    assert held(engine) == 0
    engine.wake(Residency.WEIGHTS)
    assert engine.policy_version == -1
    assert not any(torch.count_nonzero(parameter) for parameter in engine._model.parameters()), "nothing was kept"
    engine.load_weights(iter([weights]), version=3)
    engine.wake(Residency.AWAKE)
    assert said(complete(engine, PROMPTS, SAMPLING)) == before


def test_a_sleeping_engine_refuses_in_a_sentence(model: ModelSpec, build_engine: Build, complete: Complete) -> None:
    engine = build_engine(model)
    engine.sleep(Residency.ASLEEP)
    for ask in (lambda: complete(engine, PROMPTS, SAMPLING), lambda: engine.load_weights(iter([]), 1)):
        with pytest.raises(RuntimeError, match="the engine sleeps; call wake"):
            ask()
