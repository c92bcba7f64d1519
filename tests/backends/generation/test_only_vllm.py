"""What only vLLM's servers do, on the CPU."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from string import ascii_letters

import numpy as np
import psutil
import pytest
from completions import GREEDY, complete
from seeing import DEEP, seeing_model, seeing_samples

from dagrl.backends.backend import RankContext
from dagrl.backends.base import Completion, GenerationRequest
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.backends.serving.client import ServerError
from dagrl.backends.vllm.server import VllmServer
from dagrl.config.schema import ModelSpec, SamplingSpec, TokenizerSpec
from dagrl.model_files.images import split_images

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("server_backend", ["vllm"], indirect=True)]
pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"max_num_sequences": 4}, "unexpected keyword argument 'max_num_sequences'"),
        ({"max_model_len": 1024}, r"max_model_len \(1024\) is greater than the derived max_model_len"),
    ],
)
def test_arguments_that_vllm_refuses_are_named_in_one_sentence(start_engine, tmp_path, arguments, cause) -> None:
    with pytest.raises(ServerError, match=rf"^vLLM server generator/0 did not start: [^\n]*{cause}[^\n]*$"):
        start_engine(tmp_path, **arguments)


@pytest.mark.parametrize("ready", [False, True], ids=["while it loads", "after it said that it is ready"])
def test_an_engine_core_that_dies_ends_the_start(start_engine, tmp_path, monkeypatch, ready) -> None:
    if ready:
        # From there on vLLM does not watch it, and waits for ten minutes.
        monkeypatch.setattr("vllm.v1.engine.utils.wait_for_engine_startup", lambda *_: None)
    # One that has been waited for before its end was seen has no status.
    how = r"its (process EngineCore\S* was ended by SIGKILL|engine core has ended)"
    look = VllmServer._dead_process

    def kill(server: VllmServer) -> str | None:
        found = look(server)
        # Not those of another test's server, which is watched in the same way.
        for core in () if server._started.done() else server._cores:
            core.kill()
        return found

    monkeypatch.setattr(VllmServer, "_dead_process", kill)
    with pytest.raises(ServerError, match=rf"^vLLM server generator/0 did not start: {how}; [^\n]*$"):
        start_engine(tmp_path, start_timeout_s=500.0)


@pytest.mark.usefixtures("server")
def test_its_processes_meet_at_a_port_that_no_outgoing_connection_takes() -> None:
    """vLLM chooses the port many seconds before a process listens on it."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    processes = psutil.Process().children(recursive=True)
    listening = {connection.laddr.port for each in processes for connection in each.net_connections()}
    assert any(20000 <= port < first_outgoing for port in listening)


def test_a_busy_process_loses_no_experts(server, requests) -> None:
    """vLLM merges the outputs of a response that wait together for their reader."""
    done: list[Completion] = []

    async def keep_busy() -> None:
        while len(done) < len(requests):
            time.sleep(0.2)
            await asyncio.sleep(0)

    sampled = server.start_generating(requests, GREEDY, done.append)
    server._server.submit(keep_busy())
    sampled.result(timeout=60)
    for each in done:
        assert len(each.routed_experts) == len(requests[each.index].prompt) + len(each.tokens) - 1


def test_named_tokens_stop_a_response_that_ignores_the_end(server, requests) -> None:
    """SGLang cannot do both; `dagrl validate` refuses it there."""
    free = SamplingSpec(max_new_tokens=12, temperature=0, ignore_eos=True)
    wholes = complete(server, requests, free)
    stop = int(wholes[4].tokens[3])
    stopping = free.model_copy(update={"stop_token_ids": (stop,)})
    for whole, completion in zip(wholes, complete(server, requests, stopping), strict=True):
        place = [*whole.tokens, stop].index(stop)
        assert completion.tokens.tolist() == whole.tokens[: place + 1].tolist()


@pytest.fixture(scope="module")
def seeing() -> ModelSpec:
    """Qwen3-VL with heads of the size that vLLM takes on CPUs."""
    vision = {**DEEP["vision_config"], "hidden_size": 64, "out_hidden_size": 128}
    rope = {**DEEP["rope_parameters"], "mrope_section": [4, 6, 6]}
    sizes = {**DEEP, "hidden_size": 128, "head_dim": 32, "vision_config": vision, "rope_parameters": rope}
    tokens = TokenizerSpec(kind="characters", alphabet=f"{ascii_letters}01234", images=True)
    return seeing_model(**sizes).model_copy(update={"tokenizer": tokens})


def test_images_are_seen_as_transformers_sees_them(start_engine, seeing: ModelSpec, tmp_path) -> None:
    from dagrl.backends.hf.engine import HfEngine
    from dagrl.backends.hf.section import HfEngineSpec

    rows = seeing_samples()
    asked = [
        GenerationRequest(
            rows["prompt_tokens"][row],
            10 + row,
            limit=6,
            images=tuple(split_images(rows["pixel_values"][row], rows["image_sizes"][row])),
        )
        for row in range(0, 8, 2)
    ]
    # A reply and then an image, as agents send them.
    told = np.array([1, 2, *[60] * 16, 3])
    images = (*asked[0].images, *asked[3].images)
    asked.append(replace(asked[0], begun=told, images=images, image_starts=np.array([2])))
    greedy = SamplingSpec(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    reference = HfEngine(
        seeing, HfEngineSpec(backend="hf", group="rollout"), RankContext(0, 1, "127.0.0.1", 0, 60.0, 5)
    )
    server = start_engine(tmp_path, model=seeing, max_num_seqs=5)
    try:
        for version in (0, 1):
            if version:
                source = weight_source(seeing, 9)
                for engine in (reference, server):
                    engine.load_weights(iter([[(name, source.get(name)) for name in source.names()]]), version)
            expected, found = (
                {each.index: each for each in engine.generate(asked, greedy)} for engine in (reference, server)
            )
            for index, completion in expected.items():
                assert found[index].tokens.tolist() == completion.tokens.tolist()
                assert np.abs(found[index].logprobs - completion.logprobs).max() < 1e-5
    finally:
        server.close()
