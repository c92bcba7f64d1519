"""Tests dagrl's sampler for SGLang without a GPU. Triton interprets the kernel, in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.backends.serving.client import ServerError
from dagrl.backends.sglang import server

pytest.importorskip("sglang")

TOKENS_AND_LOG_PROBS = """
import torch
from dagrl.backends.sglang.sampling_kernel import sample

torch.manual_seed(3)
logits = torch.randn(5, 5000) * 3
logits[:, 100:200] = float("-inf")
temperatures = torch.tensor([[1.0], [0.5], [2.0], [1.0], [0.1]])
tokens, logprobs = sample(logits, temperatures)
expected = (logits / temperatures).log_softmax(-1)[torch.arange(5), tokens.long()]
assert torch.allclose(logprobs, expected, atol=2e-6, rtol=2e-6), (logprobs, expected)

logits = torch.tensor([[0.0, 1.0, -1.0, float("-inf"), 0.5, 2.0, -9.0]])
drawn, _ = sample(logits.expand(800, -1).contiguous(), torch.full((800, 1), 1.3))
counts = torch.bincount(drawn.long(), minlength=7)
assert len(counts) == 7 and counts[3] == 0
shares = (logits[0] / 1.3).softmax(-1)
off = (counts / 800 - shares).abs() / (shares * (1 - shares) / 800).sqrt().clamp(min=1e-9)
assert off.max() < 4, off

logits[0, 4] = float("nan")
_, logprobs = sample(logits, torch.ones(1, 1))
assert logprobs.isnan().all()
"""


def test_tokens_follow_the_softmax_and_log_probs_are_theirs():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", TOKENS_AND_LOG_PROBS], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_kernel_compiles_for_gpus():
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dagrl.backends.sglang.sampling_kernel import LANES, _sample

    types = {"logits": "*fp32", "temperatures": "*fp32", "seed": "*i64", "tokens": "*i32", "logprobs": "*fp32"}
    types |= {"vocabulary": "i32", "stride": "i32", "LANES": "constexpr"}
    source = ASTSource(fn=_sample, signature=types, constexprs={"LANES": LANES})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]


PLAIN = {
    "temperatures": None,
    "is_all_greedy": False,
    "need_top_p_sampling": False,
    "need_top_k_sampling": False,
    "need_min_p_sampling": False,
    "sampling_seed": None,
    "return_sampling_masks": [False, False],
    "has_custom_logit_processor": False,
    "grammars": None,
}


@pytest.mark.parametrize(
    ("info", "wanted", "is_fused"),
    [
        ({}, {}, True),
        ({"is_all_greedy": True}, {}, False),
        ({"need_top_p_sampling": True}, {}, False),
        ({"need_top_k_sampling": True}, {}, False),
        ({"need_min_p_sampling": True}, {}, False),
        ({"sampling_seed": "seeds"}, {}, False),
        ({"return_sampling_masks": [False, True]}, {}, False),
        ({}, {"top_logprobs_nums": [0, 2]}, False),
        ({}, {"token_ids_logprobs": [None, [1]]}, False),
    ],
)
def test_only_plain_samples_are_fused(monkeypatch: pytest.MonkeyPatch, info: dict, wanted: dict, is_fused: bool):
    from sglang.srt.layers.sampler import Sampler

    from dagrl.backends.sglang import sampler

    monkeypatch.setattr(sampler, "sample", lambda logits, temperatures: ("fused", "log-probs"))
    monkeypatch.setattr(Sampler, "forward", lambda *_: "SGLang's")
    monkeypatch.setattr(Sampler, "_preprocess_logits", lambda self, logits, info: logits)
    fused = object.__new__(sampler.FusedSampler)
    fused.__dict__["enable_deterministic"] = False
    output = SimpleNamespace(next_token_logits="logits", next_token_logprobs=None)
    asked = {"top_logprobs_nums": [0, 0], "token_ids_logprobs": [None, None]} | wanted
    tokens = fused.forward(output, SimpleNamespace(**(PLAIN | info)), True, positions=None, **asked)
    assert tokens == ("fused" if is_fused else "SGLang's")
    assert output.next_token_logprobs == ("log-probs" if is_fused else None)


@pytest.mark.parametrize("rest", ["flashinfer", "pytorch"])
def test_it_is_registered_as_the_backend_that_does_the_rest(monkeypatch: pytest.MonkeyPatch, rest: str):
    from sglang.srt.layers import sampler

    from dagrl.backends.sglang.sampler import FusedSampler, use_fused_sampler

    monkeypatch.setattr(sampler, "_CUSTOM_SAMPLER_FACTORIES", {})
    use_fused_sampler(SimpleNamespace(sampling_backend=rest))
    assert {rest: FusedSampler} == sampler._CUSTOM_SAMPLER_FACTORIES


@pytest.mark.parametrize(("given", "is_fused"), [("fused", True), ("pytorch", False)])
def test_a_server_has_it_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, is_fused: bool):
    """ServerArgs does not have the name, and would replace it on a CPU."""
    made, engine_class = [], server._engine_class

    def refuse(*args: Any) -> Any:
        schedule = engine_class(*args).run_scheduler_process_func

        def engine(**arguments: Any) -> None:
            made.append((schedule.args[1], arguments))
            raise ValueError("enough is known")

        return engine

    monkeypatch.setattr(server, "_engine_class", refuse)
    with pytest.raises(ServerError, match="enough is known"):
        server.SglangServer("generator/0", {"sampling_backend": given, "tp_size": 1}, tmp_path / "log", 60)
    assert made == [(is_fused, {"tp_size": 1} if is_fused else {"sampling_backend": given, "tp_size": 1})]
