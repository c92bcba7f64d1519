"""The life of a response: what is asked of the server, and what becomes of it when others interfere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.serving.client import ServerError, ServerResponse
from dagrl.backends.serving.responses import ResponseReader
from dagrl.backends.sglang.client import Client
from dagrl.config.schema import SamplingSpec

SAMPLING = SamplingSpec(max_new_tokens=6, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, stop_token_ids=(9,))
REQUEST = GenerationRequest(np.array([4, 5]), 0)


class FakeClient:
    """A server that samples 100, 101, ... until it is told how a request ends."""

    shares_prompts = True

    def parameters(
        self, sampling: SamplingSpec, left: int, seed: int, begun: int, stops: Sequence[int]
    ) -> dict[str, Any]:
        return Client.parameters(self, sampling, left, seed, begun, stops)  # type: ignore[arg-type]

    def __init__(self) -> None:
        self.remembered: list[tuple[list[int], str]] = []
        self.has_computed = asyncio.Event()
        """Set, what is to be remembered is there."""
        self.routed_experts: np.ndarray | None = None
        self.asked: dict[str, tuple[list[int], dict[str, Any], str]] = {}
        self.calls: list[str] = []
        self._ends: dict[str, asyncio.Future[ServerResponse]] = {}

    async def generate(
        self, rid: str, tokens: list[int], sampling: dict[str, Any], cache_key: str, images: Any, until: Any
    ) -> ServerResponse:
        self.asked[rid] = (tokens, sampling, cache_key)
        self.until = until
        self._ends[rid] = asyncio.get_running_loop().create_future()
        try:
            return await self._ends[rid]
        finally:
            self._ends.pop(rid, None)

    def end(self, reason: str, tokens: int) -> None:
        """All requests under way end with so many tokens."""
        sampled = np.arange(100, 100 + tokens)
        for future in self._ends.values():
            if not future.done():
                logprobs = np.full(tokens, -0.5, np.float32)
                future.set_result(ServerResponse(reason, "why it did", sampled, logprobs, self.routed_experts))

    async def remember(self, rid: str, tokens: list[int], cache_key: str, images: Any) -> None:
        self.remembered.append((tokens, cache_key))
        await self.has_computed.wait()

    def abort(self, rid: str) -> None:
        self.calls.append(f"abort {rid}")

    def abort_all(self) -> None:
        self.calls.append("abort all")
        self.has_computed.set()
        self.end("abort", 2)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def go_on(self) -> None:
        self.calls.append("go on")

    def tokens_of(self, rid: str) -> int:
        return 1


class Hundreds:
    """A tokenizer whose token 100 is "0", 101 is "1", and so on."""

    eos_token_id = 7

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(str(token - 100) if token >= 100 else "." for token in tokens)


class Scene:
    """Some responses to a fake server, under weights of `version`."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.version = 3
        self.responses = ResponseReader(self.client, lambda: self.version, Hundreds(), {8, 7})  # type: ignore[arg-type]
        self.done: list[Completion] = []
        self._calls: list[asyncio.Task[None]] = []

    async def begin(self, *requests: GenerationRequest, sampling: SamplingSpec = SAMPLING) -> asyncio.Task[None]:
        sampling = self.responses.sample(requests or [REQUEST], sampling, self.responses.born, self.done.append)
        call = asyncio.get_running_loop().create_task(sampling)
        await settle()
        return call


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def play() -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], None]:
    async def acted(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        await act(Scene())

    return lambda act: asyncio.run(asyncio.wait_for(acted(act), timeout=100))


def test_a_request_has_the_sampling_of_its_node(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(GenerationRequest(np.array([4, 5]), 2**63 + 8, np.array([6])))
        [(tokens, sampling, cache_key)] = scene.client.asked.values()
        assert (tokens, cache_key) == ([4, 5, 6], "3")
        assert sampling == {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "min_p": 0.1,
            "max_new_tokens": 5,
            "stop_token_ids": [9, 7, 8],
            "ignore_eos": False,
            # Of which SGLang makes a signed number.
            "sampling_seed": 8,
        }
        assert scene.responses.sampled == 1
        scene.client.end("stop", 2)
        await call
        [completion] = scene.done
        assert completion.tokens.tolist() == [100, 101] and completion.logprobs.tolist() == [-0.5, -0.5]
        assert (completion.index, completion.finish_reason, completion.policy_version) == (0, "stop", 3)
        assert scene.responses.sampled == 2

    play(act)


@pytest.mark.parametrize(("begun", "asked"), [(5, [1]), (6, []), (7, [])])
def test_a_response_that_has_begun_gets_what_is_left_to_its_end(play, begun, asked) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(GenerationRequest(np.array([4]), 0, np.arange(begun)))
        assert [sampling["max_new_tokens"] for _, sampling, _ in scene.client.asked.values()] == asked
        scene.client.end("length", 1)
        await call
        assert [(each.finish_reason, len(each.tokens)) for each in scene.done] == [("length", len(asked))]

    play(act)


def test_each_response_has_its_own_id_and_is_delivered_when_it_ends(play) -> None:
    async def act(scene: Scene) -> None:
        first = await scene.begin(REQUEST, REQUEST)
        second = await scene.begin(REQUEST)
        assert len(scene.client.asked) == 3
        scene.client.end("length", 6)
        await asyncio.gather(first, second)
        assert sorted(each.index for each in scene.done) == [0, 0, 1]

    play(act)


def test_an_abort_is_for_those_before_it(play) -> None:
    async def act(scene: Scene) -> None:
        born = scene.responses.born
        call = await scene.begin()
        scene.responses.abort()
        await call
        assert [(each.finish_reason, len(each.tokens)) for each in scene.done] == [("abort", 2)]
        # A call that was made before it, and whose requests have not begun.
        await scene.responses.sample([REQUEST], SAMPLING, born, scene.done.append)
        assert (scene.done[-1].finish_reason, len(scene.done[-1].tokens)) == ("abort", 0)
        later = await scene.begin()
        scene.client.end("stop", 1)
        await later
        assert scene.done[-1].finish_reason == "stop"

    play(act)


def test_a_late_abort_drops_no_tokens(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin()
        scene.client.end("stop", 3)
        scene.responses.abort()
        await call
        assert [(each.finish_reason, len(each.tokens)) for each in scene.done] == [("stop", 3)]

    play(act)


def test_retracted_responses_continue_after_their_tokens_with_new_weights(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin()
        await scene.responses.stand_still("retract")
        assert scene.client.calls == ["abort all"] and not scene.done
        scene.version = 4
        await settle()
        assert len(scene.client.asked) == 1, "nothing is asked while it stands still"
        await scene.responses.go_on("retract")
        await settle()
        tokens, sampling, cache_key = list(scene.client.asked.values())[1]
        assert (tokens, sampling["max_new_tokens"], cache_key) == ([4, 5, 100, 101], 4, "4")
        scene.client.end("length", 4)
        await call
        [completion] = scene.done
        assert completion.tokens.tolist() == [100, 101, 100, 101, 102, 103]
        assert completion.policy_version == 3, "the oldest weights that sampled any of it"
        versions = completion.token_versions.tolist()
        assert versions == sorted(versions) and set(versions) == {3, 4} and len(versions) == len(completion.tokens)

    play(act)


def test_experts_of_what_was_sampled_are_known_though_a_later_request_ends_in_the_queue(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin()
        scene.client.routed_experts = np.zeros((3, 1, 2), np.int16)
        await scene.responses.stand_still("retract")
        await scene.responses.go_on("retract")
        await settle()
        scene.client.routed_experts = None
        end = scene.client.end
        scene.client.end = lambda reason, tokens: end(reason, 0)  # type: ignore[method-assign]
        scene.responses.abort()
        await call
        [completion] = scene.done
        assert completion.tokens.tolist() == [100, 101]
        assert completion.routed_experts is not None and len(completion.routed_experts) == 3

    play(act)


def test_a_request_that_had_not_reached_the_server_is_aborted_again(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin()
        heard, scene.client.end = scene.client.end, lambda reason, tokens: None  # type: ignore[method-assign]
        standing = asyncio.get_running_loop().create_task(scene.responses.stand_still("retract"))
        await settle()
        assert scene.client.calls == ["abort all"] and not standing.done()
        scene.client.end = heard  # type: ignore[method-assign]
        await standing
        assert scene.client.calls == ["abort all"] * 2
        call.cancel()

    play(act)


def test_a_response_without_tokens_is_of_the_weights_that_sampled_it(play) -> None:
    async def act(scene: Scene) -> None:
        await scene.responses.stand_still("abort")
        call = await scene.begin()
        assert not scene.client.asked
        scene.version = 4
        await scene.responses.go_on("abort")
        await settle()
        scene.client.end("stop", 1)
        await call
        assert [each.policy_version for each in scene.done] == [4]

    play(act)


def test_standing_still_by_abort_ends_everything(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(REQUEST, REQUEST)
        await scene.responses.stand_still("abort")
        assert scene.client.calls == ["abort all"]
        await scene.responses.go_on("abort")
        await call
        assert [each.finish_reason for each in scene.done] == ["abort", "abort"]

    play(act)


def test_standing_still_in_place_leaves_everything_where_it_is(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin()
        await scene.responses.stand_still("in_place")
        scene.version = 4
        late = await scene.begin()
        assert len(scene.client.asked) == 1, "new ones wait"
        await scene.responses.go_on("in_place")
        await settle()
        assert scene.client.calls == ["pause", "go on"] and len(scene.client.asked) == 2
        scene.client.end("stop", 1)
        await asyncio.gather(call, late)
        assert sorted(each.policy_version for each in scene.done) == [3, 4]

    play(act)


def test_a_request_aborted_by_the_server_is_an_error(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(REQUEST)
        scene.client.end("abort", 1)
        with pytest.raises(ServerError, match="aborted a response: why it did"):
            await call

    play(act)


def test_a_call_that_is_given_up_is_ended_in_the_server(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(REQUEST, REQUEST)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sorted(scene.client.calls) == sorted(f"abort {rid}" for rid in scene.client.asked)
        await scene.responses.stand_still("abort")

    play(act)


def test_no_request_id_is_a_prefix_of_another(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(*[REQUEST] * 12)
        names = sorted(scene.client.asked)
        assert not any(longer.startswith(name) for name, longer in pairwise(names))
        scene.client.end("stop", 1)
        await call

    play(act)


LONG = [GenerationRequest(np.arange(10, 10 + length), seed) for seed, length in enumerate((70, 70, 80, 70))]


def test_a_prompt_of_a_group_is_computed_once(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(*LONG)
        assert scene.client.remembered == [(LONG[0].prompt.tolist(), "3")]
        assert [tokens for tokens, *_ in scene.client.asked.values()] == [LONG[2].prompt.tolist()], "the others wait"
        scene.client.has_computed.set()
        await settle()
        assert len(scene.client.asked) == 4
        scene.client.end("stop", 3)
        await call
        assert sorted(each.index for each in scene.done) == [0, 1, 2, 3]

    play(act)


def test_short_prompts_and_caches_that_are_off_are_not_waited_for(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(REQUEST, REQUEST)
        scene.client.shares_prompts = False
        other = await scene.begin(*LONG)
        assert scene.client.remembered == [] and len(scene.client.asked) == 6
        scene.client.end("stop", 3)
        await asyncio.gather(call, other)

    play(act)


def test_an_abort_finds_those_too_that_wait_for_their_prompt(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(LONG[0], LONG[1])
        scene.responses.abort()
        await call
        assert [(each.finish_reason, len(each.tokens)) for each in scene.done] == [("abort", 0)] * 2
        assert scene.client.asked == {}

    play(act)


def test_no_prompt_is_computed_while_the_server_is_paused(play) -> None:
    async def act(scene: Scene) -> None:
        await scene.responses.stand_still("retract")
        call = await scene.begin(LONG[0], LONG[1])
        assert scene.client.remembered == []
        scene.version = 4
        await scene.responses.go_on("retract")
        await settle()
        assert scene.client.remembered == [(LONG[0].prompt.tolist(), "4")]
        scene.client.has_computed.set()
        await settle()
        scene.client.end("stop", 3)
        await call

    play(act)


def test_a_call_that_is_given_up_takes_its_prompt_along(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(LONG[0], LONG[1])
        call.cancel()
        await asyncio.wait([call])
        assert scene.client.calls == ["abort dagrl-0."]

    play(act)


def test_a_pause_ends_prompts_too_and_their_group_continues_afterwards(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(LONG[0], LONG[1])
        await scene.responses.stand_still("retract")
        assert scene.client.calls == ["abort all"] and not scene.client.asked
        await scene.responses.go_on("retract")
        await settle()
        scene.client.end("stop", 3)
        await call
        assert sorted(each.index for each in scene.done) == [0, 1]

    play(act)


def test_a_response_ends_with_the_token_that_completes_a_stop_string(play) -> None:
    stopping = SAMPLING.model_copy(update={"stop": ("9", "34")})

    async def act(scene: Scene) -> None:
        scene.client.routed_experts = np.zeros((len(REQUEST.prompt) + 9, 1, 1), np.int16)
        call = await scene.begin(sampling=stopping)
        assert not scene.client.until([100, 101, 102, 103])
        assert scene.client.until([104])
        # Tokens that the server has sampled meanwhile.
        scene.client.end("abort", 10)
        await call
        (completion,) = scene.done
        assert completion.tokens.tolist() == [100, 101, 102, 103, 104]
        assert completion.finish_reason == "stop" and len(completion.logprobs) == len(completion.token_versions) == 5
        assert len(completion.routed_experts) == len(REQUEST.prompt) + 4

    play(act)


def test_stop_strings_count_from_where_the_policys_turn_begins(play) -> None:
    stopping = SAMPLING.model_copy(update={"stop": ("01", "10")})

    async def ended(turn_start: int) -> Completion:
        scene = Scene()
        request = GenerationRequest(np.array([1]), 0, np.array([101, 101]), turn_start=turn_start)
        call = await scene.begin(request, sampling=stopping)
        scene.client.until([100, 101, 102])
        scene.client.end("length", 3)
        await call
        return scene.done[0]

    async def act(_: Scene) -> None:
        assert (await ended(0)).tokens.tolist() == [100], "the policy has said 1 before"
        assert (await ended(2)).tokens.tolist() == [100, 101], "another has said it"

    play(act)


def test_a_response_without_its_stop_string_is_whole(play) -> None:
    async def act(scene: Scene) -> None:
        call = await scene.begin(sampling=SAMPLING.model_copy(update={"stop": ("77",)}))
        assert not scene.client.until([100, 101])
        scene.client.end("length", 2)
        await call
        assert (scene.done[0].finish_reason, len(scene.done[0].tokens)) == ("length", 2)

    play(act)
