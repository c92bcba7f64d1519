"""What only vLLM's servers do, on the CPU."""

from __future__ import annotations

import pytest

from dagrl.backends.serving.client import ServerError

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
