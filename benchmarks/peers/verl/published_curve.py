"""The learning curve of verl on the published model, beside `benchmarks/published_model.py --case grpo`.

    PYTHONPATH=.:benchmarks python benchmarks/peers/verl/published_curve.py --model FOLDER --data FOLDER --out FOLDER

`--model` is the model after SFT as a Hugging Face folder, which `dagrl export` writes, and `--data` the word problems.
Prompts, batch, sampling, learning rate, loss and validation are those of `dag_templates/smollm2_grpo.yaml`. Writes
``verl_SEED.json`` with the fields of that script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from compare import verl_environment
from phases import verl_steps
from published_model import HIGH, figures
from reports import tell

_VALIDATED = 500
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def arguments(model: Path, train: Path, validation: Path, out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Hydra overrides of verl's trainer."""
    return {
        "model_engine": "megatron",
        "data.train_files": train,
        "data.val_files": validation,
        "data.train_batch_size": 64,
        "data.max_prompt_length": 256,
        "data.max_response_length": 160,
        "data.seed": seed,
        "data.dataloader_num_workers": 2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{_ACTOR}.ppo_mini_batch_size": 32,
        f"{_ACTOR}.ppo_epochs": 1,
        f"{_ACTOR}.clip_ratio": 0.2,
        f"{_ACTOR}.clip_ratio_c": 3.0,
        f"{_ACTOR}.entropy_coeff": 0.0,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.use_kl_loss": True,
        f"{_ACTOR}.kl_loss_coef": 0.001,
        f"{_ACTOR}.kl_loss_type": "low_var_kl",
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": 49152,
        f"{_ACTOR}.optim.lr": 1e-5,
        f"{_ACTOR}.optim.weight_decay": 0.01,
        f"{_ACTOR}.optim.clip_grad": 1.0,
        f"{_ACTOR}.megatron.param_offload": False,
        f"{_ACTOR}.megatron.optimizer_offload": False,
        f"{_ACTOR}.megatron.override_transformer_config.attention_backend": "auto",
        # Needs Apex; dagrl does without it too.
        f"+{_ACTOR}.megatron.override_transformer_config.gradient_accumulation_fusion": False,
        f"{_ROLLOUT}.name": "sglang",
        f"{_ROLLOUT}.n": 8,
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.temperature": 1.0,
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": 49152,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 49152,
        f"{_ROLLOUT}.free_cache_engine": False,
        f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{_ROLLOUT}.max_num_seqs": 512,
        f"{_ROLLOUT}.max_model_len": 480,
        f"{_ROLLOUT}.val_kwargs.do_sample": False,
        f"{_ROLLOUT}.val_kwargs.n": 1,
        f"+{_ROLLOUT}.engine_kwargs.sglang.attention_backend": "fa3",
        f"+{_ROLLOUT}.engine_kwargs.sglang.random_seed": seed,
        f"+{_ROLLOUT}.engine_kwargs.sglang.cuda_graph_backend_prefill": "disabled",
        "reward.custom_reward_function.path": Path(__file__).with_name("published_reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": '["console","file"]',
        "trainer.project_name": "beside_dagrl",
        "trainer.experiment_name": f"published_{seed}",
        "trainer.val_before_train": True,
        "trainer.test_freq": 20,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": 10,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": out / "verl_checkpoints",
    }


def as_dagrl(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of verl's log under dagrl's names, for `figures`. Line 0 has the validation before the first step."""
    found = []
    for step, line in enumerate(lines):
        accuracies = [value for name, value in line.items() if name.startswith("val-core/") and "/mean@1" in name]
        own: dict[str, Any] = {"step": step}
        if accuracies:
            # Each class of problems has the same number of rows.
            own["val/reward/mean"] = sum(accuracies) / len(accuracies)
        if "timing_s/step" in line:
            own |= {"time/step_s": line["timing_s/step"] - line.get("timing_s/testing", 0.0)}
            own |= {"reward/mean": line["critic/score/mean"]}
        found.append(own)
    return found


def main() -> None:
    """Run verl and write its curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    folder = (args.out / f"verl_{args.seed}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    validation, metrics = folder / "validation.parquet", folder / "verl.jsonl"
    pq.write_table(pq.read_table(args.data / "test.parquet").slice(0, _VALIDATED), validation)
    train = (args.data / "train.parquet").resolve()
    found = arguments(args.model.resolve(), train, validation, folder, args.seed, args.steps)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in found.items())]
    environment = verl_environment(folder, metrics)
    with (folder / "verl.log").open("w") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    lines = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    result = {"case": "verl", "seed": args.seed, "steps": len(verl_steps(metrics)), "aim": HIGH}
    tell(result | figures(as_dagrl(lines)), [], args.out / f"verl_{args.seed}.json")


if __name__ == "__main__":
    main()
