"""The cases that are compared, and one table of their settings from which both command lines are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipelines import Load, grpo_pipeline, server_arguments

LEARNING_RATE = 1e-6
MINI_BATCHES = 2
"""Optimizer steps of a GRPO step."""

type Mode = Literal["together", "turns", "apart"]
"""Trainer and server on the same GPUs, both awake or in turns; or on GPUs of their own, the server a step ahead."""


@dataclass(frozen=True, slots=True)
class Case:
    """The workload of a step, and its layout. If trainer and servers are apart, `gpus` counts those of one side."""

    name: str
    model: str
    mode: Mode
    gpus: int = 1
    tensor_parallel: int = 1
    """Tensor-parallel size of the trainer and of each server."""
    prompts: int = 128
    n: int = 4
    prompt_tokens: int = 256
    response_tokens: int = 512
    rows_per_micro_batch: int = 16
    steps: int = 4

    @property
    def load(self) -> Load:
        """Samples of a step."""
        return Load(self.prompts, self.n, self.prompt_tokens, self.response_tokens)

    @property
    def server_load(self) -> Load:
        """Samples that one server generates in a step."""
        return replace(self.load, prompts=self.prompts * self.tensor_parallel // self.gpus)

    @property
    def tokens_per_micro_batch(self) -> int:
        """Packed tokens of a forward pass."""
        return self.rows_per_micro_batch * self.load.row_tokens


CASES = {
    case.name: case
    for case in (
        Case("on_policy", "1.7b", "together"),
        Case("one_step_off", "1.7b", "apart", steps=8),
        Case("8b_tp2", "8b", "turns", gpus=2, tensor_parallel=2),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, and where each framework has it."""

    value: Callable[[Case], Any]
    verl: str
    """Hydra key."""
    dagrl: str
    """Path in the pipeline file."""
    of: Callable[[Case], bool] = lambda case: True
    """The cases that have it."""


def _apart(case: Case) -> bool:
    return case.mode == "apart"


_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"

SETTINGS = (
    Setting(lambda case: case.prompts, "data.train_batch_size", "data.prompts_per_step"),
    Setting(lambda case: case.prompt_tokens, "data.max_prompt_length", "data.max_prompt_tokens"),
    Setting(lambda case: case.response_tokens, "data.max_response_length", "nodes.rollout.sampling.max_new_tokens"),
    Setting(lambda case: case.n, f"{_ROLLOUT}.n", "nodes.rollout.n"),
    Setting(lambda case: 1.0, f"{_ROLLOUT}.temperature", "nodes.rollout.sampling.temperature"),
    Setting(lambda case: "grpo", "algorithm.adv_estimator", "nodes.advantage.estimator"),
    Setting(lambda case: case.prompts // MINI_BATCHES, f"{_ACTOR}.ppo_mini_batch_size", "nodes.update.mini_batch"),
    Setting(lambda case: 1, f"{_ACTOR}.ppo_epochs", "nodes.update.epochs"),
    Setting(lambda case: 0.2, f"{_ACTOR}.clip_ratio", "nodes.update.loss.clip_ratio"),
    Setting(lambda case: 3.0, f"{_ACTOR}.clip_ratio_c", "nodes.update.loss.dual_clip"),
    Setting(lambda case: 0.0, f"{_ACTOR}.entropy_coeff", "nodes.update.loss.entropy_coef"),
    Setting(lambda case: "token-mean", f"{_ACTOR}.loss_agg_mode", "nodes.update.loss.aggregation"),
    Setting(
        lambda case: case.tokens_per_micro_batch,
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "nodes.update.tokens_per_micro_batch",
    ),
    Setting(
        lambda case: case.tokens_per_micro_batch,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
        "nodes.old.tokens_per_micro_batch",
    ),
    Setting(lambda case: LEARNING_RATE, f"{_ACTOR}.optim.lr", "engines.actor.optimizer.lr"),
    Setting(lambda case: 0.0, f"{_ACTOR}.optim.weight_decay", "engines.actor.optimizer.weight_decay"),
    Setting(lambda case: 1.0, f"{_ACTOR}.optim.clip_grad", "engines.actor.optimizer.clip_grad"),
    Setting(
        lambda case: case.tensor_parallel,
        f"{_ACTOR}.megatron.tensor_model_parallel_size",
        "engines.actor.parallel.tensor_model_parallel_size",
    ),
    Setting(
        lambda case: case.tensor_parallel, f"{_ROLLOUT}.tensor_model_parallel_size", "engines.generator.server.tp_size"
    ),
    Setting(
        lambda case: "token",
        "algorithm.rollout_correction.rollout_is",
        "nodes.update.rollout_correction.rollout_is",
        _apart,
    ),
    Setting(
        lambda case: 2.0,
        "algorithm.rollout_correction.rollout_is_threshold",
        "nodes.update.rollout_correction.rollout_is_threshold",
        _apart,
    ),
)


def settings_of(case: Case) -> list[Setting]:
    """The settings that this case has."""
    return [setting for setting in SETTINGS if setting.of(case)]


def place(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b.c` in nested mappings."""
    *folders, last = path.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[last] = value


def dagrl_pipeline(case: Case, model: Path, prompts: Path) -> dict[str, Any]:
    """The pipeline file of a case."""
    pipeline = grpo_pipeline(
        f"beside-verl-{case.name}".replace("_", "-"),
        model,
        prompts,
        case.load,
        server_arguments(case.server_load),
        apart=case.mode == "apart",
        gpus=case.gpus,
        sleep=case.mode == "turns",
        mini_batch=case.prompts // MINI_BATCHES,
        tokens_per_micro_batch=case.tokens_per_micro_batch,
    )
    for setting in settings_of(case):
        place(pipeline, setting.dagrl, setting.value(case))
    if case.mode == "apart":
        pipeline["schedule"] = {"max_staleness": 1}
    pipeline["run"]["steps"] = case.steps + 1
    return pipeline


def verl_arguments(case: Case, model: Path, folder: Path) -> list[str]:
    """Hydra overrides of verl's trainer for a case. `folder` has the prompts, and takes what verl writes."""
    load = case.server_load
    server = server_arguments(load)
    leaves = case.mode == "turns"
    fixed: dict[str, Any] = {
        # As `order: file` of `grpo_pipeline`.
        "data.shuffle": False,
        "model_engine": "megatron",
        "data.train_files": folder / "verl_prompts.parquet",
        "data.val_files": folder / "verl_prompts.parquet",
        "data.filter_overlong_prompts": False,
        "data.dataloader_num_workers": 2,
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{_ACTOR}.use_kl_loss": False,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.megatron.param_offload": leaves,
        f"{_ACTOR}.megatron.optimizer_offload": leaves,
        # Transformer Engine chooses the kernel, as for dagrl.
        f"{_ACTOR}.megatron.override_transformer_config.attention_backend": "auto",
        # Needs Apex; dagrl does without it too.
        f"+{_ACTOR}.megatron.override_transformer_config.gradient_accumulation_fusion": False,
        f"+{_ACTOR}.megatron.override_transformer_config.apply_rope_fusion": True,
        f"+{_ACTOR}.megatron.override_transformer_config.bias_activation_fusion": True,
        f"{_ROLLOUT}.name": "sglang",
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{_ROLLOUT}.free_cache_engine": leaves,
        f"{_ROLLOUT}.gpu_memory_utilization": server.get("mem_fraction_static", 0.85),
        f"{_ROLLOUT}.max_num_seqs": load.samples,
        f"{_ROLLOUT}.max_model_len": load.row_tokens + 64,
        # verl would take flashinfer, which compiles kernels at their first use; dagrl's server takes FlashAttention 3.
        f"+{_ROLLOUT}.engine_kwargs.sglang.attention_backend": "fa3",
        f"+{_ROLLOUT}.engine_kwargs.sglang.random_seed": 1,
        "reward.custom_reward_function.path": Path(__file__).with_name("reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": case.gpus,
        "trainer.logger": '["console","file"]',
        "trainer.project_name": "beside_dagrl",
        "trainer.experiment_name": case.name,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": 1,
        # The last step differs: it saves in dagrl, and a step ahead generates nothing. It is not measured.
        "trainer.total_training_steps": case.steps + 1,
        "trainer.default_local_dir": folder / "verl_checkpoints",
    }
    for name in ("max_total_tokens", "cuda_graph_max_bs_decode"):
        if name in server:
            fixed[f"+{_ROLLOUT}.engine_kwargs.sglang.{name}"] = server[name]
    if case.mode == "apart":
        del fixed["model_engine"]  # the configuration of this trainer has it
        fixed |= {
            "hydra.searchpath": "[pkg://verl.trainer.config]",
            "actor_rollout_ref.hybrid_engine": False,
            "rollout.nnodes": 1,
            "rollout.n_gpus_per_node": case.gpus,
            # Old log-probs by the trainer, as in dagrl, not those of the server.
            "algorithm.rollout_correction.bypass_mode": False,
        }
    arguments = [f"{key}={value}" for key, value in fixed.items()]
    for setting in settings_of(case):
        arguments.append(f"{setting.verl}={setting.value(case)}")
    return arguments


def verl_module(case: Case) -> list[str]:
    """The module of verl's trainer and its configuration."""
    if case.mode == "apart":
        module = "verl.experimental.one_step_off_policy.main_ppo"
        return [module, "--config-name=one_step_off_ppo_megatron_trainer.yaml"]
    return ["verl.trainer.main_ppo"]
