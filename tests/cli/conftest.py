from pathlib import Path

import pytest

ROW = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW] * 16), tmp_path / "train.parquet")
    path = tmp_path / "p.yaml"
    path.write_text(
        "name: tiny\n"
        "model: {init: {model_type: qwen3, hidden_size: 64}, tokenizer: {kind: bytes}}\n"
        "data: {train: train.parquet, prompts_per_step: 8, max_prompt_tokens: 16}\n"
        "groups: {all: {cpus_per_node: 2}}\n"
        "engines:\n"
        "  actor: {backend: megatron, group: all, optimizer: {lr: 1e-3}}\n"
        "  generator: {backend: hf, group: all, weights_from: actor}\n"
        "nodes:\n"
        "  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}\n"
        "  reward: {op: reward, fn: exact}\n"
        "  advantage: {op: advantage, estimator: grpo}\n"
        "  update: {op: update, engine: actor}\n"
        "run: {steps: 10}\n"
    )
    return path
