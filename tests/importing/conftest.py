import json
from pathlib import Path

import pytest

from dagrl.config.errors import PipelineError
from dagrl.importing.settings import Setting, Settings
from dagrl.importing.table import Status, translate
from dagrl.plugins.isolation import without_imports
from dagrl.validation import check_file

SOURCES = Path(__file__).parent / "sources"


@pytest.fixture
def sources() -> Path:
    return SOURCES


@pytest.fixture
def translated():
    """Translate settings of a framework; returns the keys of the pipeline."""
    from dagrl.importing.registry import FRAMEWORKS

    def run(framework: str, given: dict) -> dict:
        settings = Settings()
        for line, (key, value) in enumerate(given.items(), start=1):
            settings.add(Setting(key, value, "source", line))
        return translate(FRAMEWORKS[framework], settings).tree

    return run


VERL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "data/train.parquet",
    "data.val_files": None,
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.model.path": "model",
}
SLIME = {
    "--hf-checkpoint": "model",
    "--prompt-data": "data/train.parquet",
    "--rollout-batch-size": 32,
    "--n-samples-per-prompt": 8,
    "--rollout-max-response-len": 512,
    "--num-rollout": 10,
    "--rm-type": "math",
    "--colocate": True,
}
ROLL = {
    "pretrain": "model",
    "actor_train.data_args.file_name": "data/train.parquet",
    "response_length": 512,
    "num_return_sequences_in_group": 8,
    "adv_estimator": "grpo",
    "actor_train.strategy_args.strategy_name": "megatron_train",
    "actor_infer.strategy_args.strategy_name": "sglang",
    "actor_train.training_args.learning_rate": 1.0e-6,
    "actor_train.device_mapping": "list(range(0,8))",
    "actor_infer.device_mapping": "list(range(0,8))",
    "rewards.math.worker_cls": "MathRuleRewardWorker",
}
TRINITY = {
    "algorithm.algorithm_type": "grpo",
    "model.model_path": "model",
    "model.max_prompt_tokens": 256,
    "model.max_response_tokens": 512,
    "buffer.batch_size": 32,
    "buffer.explorer_input.taskset.path": "data/train.parquet",
    "explorer.rollout_model.engine_type": "sglang",
}
BASES = {"verl": VERL, "slime": SLIME, "roll": ROLL, "trinity": TRINITY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("validity")
    (path / "model").mkdir()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (path / "model" / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def bases():
    """The settings of a small script of each framework."""
    return BASES


@pytest.fixture
def translation():
    """Translate settings on top of those of a small script."""
    from dagrl.importing.registry import FRAMEWORKS

    def run(framework: str, given: dict):
        settings = Settings()
        for line, (key, value) in enumerate({**BASES[framework], **given}.items(), start=1):
            settings.add(Setting(key, value, "source", line))
        return translate(FRAMEWORKS[framework], settings)

    return run


@pytest.fixture
def checked(folder, translation, unlisted):
    """Translate settings on top of those of a small script; returns translation and problems that are not listed."""
    from dagrl.importing.pipeline_text import pipeline_text

    def run(framework: str, given: dict):
        found = translation(framework, given)
        path = folder / "pipeline.yaml"
        path.write_text(pipeline_text(found, path))
        return found, unlisted(path, found)

    return run


@pytest.fixture
def unlisted():
    """Return the problems of a pipeline that the translation does not list for the user to decide."""

    def run(path, translation):
        decided = [target for line in translation.lines if line.status is Status.UNKNOWN for target in line.targets]
        try:
            with without_imports():
                check_file(path, with_files=False)
        except PipelineError as error:
            places = [problem.place for problem in error.problems]
            return [each for each in places if not any(_overlap(each, target) for target in decided)]
        return []

    return run


def _overlap(one, other):
    """Whether one key is the other, or in it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
