from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dagrl.backends.megatron.section import LearningRateSpec, MegatronEngineSpec


def spec(**fields: Any) -> MegatronEngineSpec:
    return MegatronEngineSpec.model_validate({"backend": "megatron", "group": "train", **fields})


def rates(schedule: LearningRateSpec, steps: int, *, train_steps: int) -> list[float]:
    from dagrl.backends.megatron.engine.optimizer import make_schedule

    config = SimpleNamespace(lr=8.0, weight_decay=0.01)
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": None, "weight_decay": None}], config=config)
    scheduler = make_schedule(optimizer, schedule, train_steps=train_steps)
    values = []
    for _ in range(steps):
        scheduler.step(1)
        values.append(optimizer.param_groups[0]["lr"])
    return values


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [8, 8, 8, 8]),
        ({"lr_warmup_steps": 2}, [4, 8, 8, 8]),
        ({"lr_decay_style": "linear"}, [6, 4, 2, 0]),
        ({"lr_decay_style": "linear", "lr_decay_steps": 2, "min_lr": 2.0}, [5, 2, 2, 2]),
        ({"lr_decay_style": "cosine", "lr_warmup_steps": 2}, [4, 8, 4, 0]),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 1}, [8, 8 / 2**0.5, 8 / 3**0.5, 4]),
        ({"lr_warmup_steps": 8}, [1, 2, 3, 4]),
        ({"lr_decay_style": "linear", "lr_warmup_steps": 8}, [1, 2, 3, 4]),
        ({"lr_warmup_ratio": 0.5}, [4, 8, 8, 8]),
        ({"lr_decay_style": "cosine", "lr_warmup_ratio": 0.6}, [4, 8, 4, 0]),
        ({"lr_decay_style": "linear", "lr_decay_steps": 3, "lr_warmup_ratio": 0.25}, [8, 4, 0, 0]),
        ({"lr_warmup_ratio": 0.1}, [8, 8, 8, 8]),
        ({"lr_decay_style": "linear", "lr_warmup_ratio": 1}, [2, 4, 6, 8]),
    ],
)
def test_learning_rate_of_each_step(schedule: dict[str, Any], expected: list[float]) -> None:
    assert rates(LearningRateSpec(**schedule), 4, train_steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "steps"), [(0.29, 29), (0.07, 7), (0.055, 5), (0.001, 0), (1, 100)])
def test_a_share_of_the_run_is_whole_steps(ratio: float, steps: int) -> None:
    # 0.29 * 100 is 28.999999999999996 as a float.
    assert LearningRateSpec(lr_warmup_ratio=ratio).warmup_steps(100) == steps


def test_optimizer_defaults_and_fields_by_name() -> None:
    from dagrl.backends.megatron.engine.optimizer import optimizer_config

    config = optimizer_config(spec(optimizer={"adam_beta2": 0.95, "lr": "2e-6"}), torch.bfloat16)
    assert (config.optimizer, config.lr, config.adam_beta1, config.adam_beta2) == ("adam", 2e-6, 0.9, 0.95)
    assert (config.weight_decay, config.clip_grad, config.use_distributed_optimizer) == (0.01, 1.0, True)
    assert (config.bf16, config.params_dtype) == (True, torch.bfloat16)
    assert optimizer_config(spec(), torch.float32).lr == 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": {"optimizer": {"clip_gard": 1.0}}}, r"optimizer\.clip_gard: .*did you mean `clip_grad`"),
        (
            {"extra": {"ddp": {"overlap_grad_reduc": True}}},
            r"ddp\.overlap_grad_reduc: .*did you mean `overlap_grad_reduce`",
        ),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    from dagrl.backends.megatron.engine.optimizer import ddp_config, optimizer_config

    with pytest.raises(ValueError, match=message):
        optimizer_config(spec(**fields), torch.float32)
        ddp_config(spec(**fields))


def hybrid(**optimizer: Any) -> Any:
    from dagrl.backends.megatron.engine.optimizer import optimizer_config

    return optimizer_config(spec(optimizer={"optimizer_cpu_offload": True, **optimizer}), torch.bfloat16)


def test_all_states_move_to_the_host_unless_a_fraction_is_given() -> None:
    whole = hybrid()
    assert whole.optimizer_cpu_offload and whole.use_precision_aware_optimizer
    assert whole.optimizer_offload_fraction == 1.0
    assert hybrid(optimizer_offload_fraction=0.5).optimizer_offload_fraction == 0.5


def test_other_optimizers_keep_megatrons_defaults() -> None:
    plain = hybrid(optimizer_cpu_offload=False)
    assert not plain.use_precision_aware_optimizer and plain.optimizer_offload_fraction == 0.0
