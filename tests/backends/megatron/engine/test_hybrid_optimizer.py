from collections.abc import Callable
from typing import Any

import pytest
import torch

from dagrl.backends.megatron.engine.optimizer import optimizer_config
from dagrl.backends.megatron.section import MegatronEngineSpec


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``config(dtype, **optimizer)``: OptimizerConfig with the hybrid optimizer, as on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def make(dtype: torch.dtype = torch.bfloat16, **optimizer: Any) -> Any:
        fields = {"optimizer_cpu_offload": True, **optimizer}
        spec = MegatronEngineSpec(backend="megatron", group="all", optimizer=fields)
        return optimizer_config(spec, dtype)

    return make


def test_all_states_move_to_the_host_unless_a_fraction_is_given(config) -> None:
    whole = config()
    assert whole.optimizer_cpu_offload and whole.use_precision_aware_optimizer
    assert whole.optimizer_offload_fraction == 1.0
    assert config(optimizer_offload_fraction=0.5).optimizer_offload_fraction == 0.5


def test_other_optimizers_keep_megatrons_defaults(config) -> None:
    plain = config(optimizer_cpu_offload=False)
    assert not plain.use_precision_aware_optimizer and plain.optimizer_offload_fraction == 0.0


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"dtype": torch.float32}, "weights in bfloat16"),
        ({"use_distributed_optimizer": False, "use_precision_aware_optimizer": False}, "use_distributed_optimizer"),
        ({"use_precision_aware_optimizer": False}, "use_precision_aware_optimizer"),
        ({"optimizer": "sgd", "use_precision_aware_optimizer": False}, "Adam"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay"),
    ],
)
def test_what_it_would_fail_with_is_told(config, fields: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError) as caught:
        config(**fields)
    assert f"optimizer.optimizer_cpu_offload: needs {fragment}" in str(caught.value)


def test_without_a_gpu_there_is_nothing_to_offload() -> None:
    spec = MegatronEngineSpec(backend="megatron", group="all", optimizer={"optimizer_cpu_offload": True})
    with pytest.raises(ValueError, match="needs a GPU"):
        optimizer_config(spec, torch.bfloat16)
