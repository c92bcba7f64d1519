"""Length, trackers, validation and strict rewards of an imported run."""

import pytest

from dagrl.importing.settings import Unresolved
from dagrl.importing.table import Status

ROLLOUT = "actor_rollout_ref.rollout"
VAL = {"data.val_files": "data/test.parquet"}
EVAL = {"--eval-interval": 5, "--eval-prompt-data": ["aime", "data/aime.parquet"]}
SETS = "buffer.explorer_input.eval_tasksets"


def status_of(translation, key):
    (line,) = [line for line in translation.lines if line.key == key]
    return line.status


def written(translation, prefix):
    keys = [key for key in translation.tree if key == prefix or key.startswith(f"{prefix}.")]
    return {key.removeprefix(prefix).lstrip("."): translation.tree[key] for key in keys}


@pytest.mark.parametrize(
    ("framework", "given", "epochs", "steps"),
    [
        ("verl", {}, 30, None),
        ("verl", {"trainer.total_epochs": 15}, 15, None),
        ("verl", {"trainer.total_epochs": 15, "trainer.total_training_steps": 7}, None, 7),
        ("verl", {"trainer.total_epochs": Unresolved("$N", ("$N",))}, None, None),
        ("slime", {"--num-epoch": 2}, None, 10),
        ("slime", {"--num-rollout": None, "--num-epoch": 2}, 2, None),
        ("slime", {"--num-rollout": None}, None, None),
        ("roll", {}, None, 500),
        ("trinity", {}, 1, None),
        ("trinity", {"buffer.total_epochs": 4}, 4, None),
        ("trinity", {"buffer.total_epochs": 4, "buffer.total_steps": 9}, None, 9),
    ],
)
def test_epochs_where_there_are_no_steps(checked, framework, given, epochs, steps):
    found, problems = checked(framework, given)
    assert problems == []
    assert (found.tree.get("run.epochs"), found.tree.get("run.steps")) == (epochs, steps)


PROJECT = {"trainer.project_name": "sums", "trainer.experiment_name": "third try"}


@pytest.mark.parametrize(
    ("framework", "given", "track"),
    [
        ("verl", {}, ["console", "wandb"]),
        ("verl", PROJECT, ["console", {"tracker": "wandb", "project": "sums", "name": "third try"}]),
        (
            "verl",
            {**PROJECT, "trainer.experiment_name": "third", "trainer.logger": ["mlflow", "tensorboard"]},
            ["console", {"tracker": "mlflow", "project": "sums"}, "tensorboard"],
        ),
        ("verl", {**PROJECT, "trainer.logger": "tensorboard"}, ["console", "tensorboard"]),
        ("verl", {"trainer.project_name": 7}, ["console", {"tracker": "wandb", "project": "7"}]),
        ("verl", {"trainer.project_name": Unresolved("$P", ("$P",))}, ["console", "wandb"]),
        (
            "slime",
            {"--use-wandb": True, "--wandb-project": "sums", "--wandb-group": "third", "--wandb-team": "us"},
            ["console", {"tracker": "wandb", "project": "sums", "group": "third", "entity": "us"}],
        ),
        ("slime", {"--use-tensorboard": True, "--wandb-project": "sums"}, ["console", "tensorboard"]),
        (
            "roll",
            {"track_with": "wandb", "tracker_kwargs.project": "sums", "tracker_kwargs.name": "third"},
            ["console", {"tracker": "wandb", "project": "sums", "name": "third"}],
        ),
        (
            "roll",
            {"track_with": "swanlab", "tracker_kwargs.project": "sums", "tracker_kwargs.workspace": "us"},
            ["console", {"tracker": "swanlab", "project": "sums", "entity": "us"}],
        ),
        ("roll", {"tracker_kwargs.project": "sums"}, ["console", "tensorboard"]),
        (
            "trinity",
            {"project": "sums", "group": "a", "monitor.monitor_type": "wandb"},
            ["console", {"tracker": "wandb", "project": "sums", "group": "a"}],
        ),
        (
            "trinity",
            {"project": "sums", "group": "a", "monitor.monitor_type": "mlflow"},
            ["console", {"tracker": "mlflow", "project": "sums"}],
        ),
    ],
)
def test_trackers_have_their_project_and_group(checked, framework, given, track):
    found, problems = checked(framework, given)
    assert problems == []
    assert found.tree["track"] == track
    listed = [line.key for line in found.lines if line.status is Status.UNKNOWN]
    assert [key for key, value in given.items() if isinstance(value, Unresolved) and key not in listed] == []
    assert not [line for line in found.lines if line.status is Status.REFUSED and "track" in line.note]


@pytest.mark.parametrize(
    ("framework", "given", "alone"),
    [
        ("verl", {**VAL, "trainer.val_only": True}, True),
        ("verl", {**VAL, "trainer.val_only": False}, None),
        ("verl", {**VAL, "trainer.val_only": True, "trainer.val_before_train": False}, None),
        ("verl", {"trainer.val_only": True}, None),
        ("slime", {"--num-rollout": 0, **EVAL}, True),
        ("slime", {"--num-rollout": 0}, None),
        ("trinity", {"mode": "bench", f"{SETS}.0.path": "a/b"}, True),
        ("trinity", {"mode": "bench"}, None),
    ],
)
def test_a_run_that_only_validates(checked, framework, given, alone):
    found, problems = checked(framework, given)
    assert problems == []
    assert found.tree.get("run.val_only") == alone


GSM8K = "~/data/gsm8k/train.parquet"


@pytest.mark.parametrize(
    ("framework", "given", "strict"),
    [
        ("verl", {"data.train_files": GSM8K, "data.val_files": "GSM-8K/test.parquet"}, True),
        ("verl", {"data.train_files": None, "data.val_files": None}, None),
        ("verl", {"data.train_files": GSM8K, "data.val_files": ["gsm8k/test.parquet", "math500.parquet"]}, "listed"),
        ("verl", {"data.val_files": GSM8K}, None),
        ("verl", {"data.train_files": GSM8K, "custom_reward_function.path": "my_math.py"}, None),
        ("slime", {"--prompt-data": "/root/gsm8k/train.parquet"}, True),
        ("slime", {"--prompt-data": "/root/gsm8k/train.parquet", **EVAL}, "listed"),
        ("slime", {"--prompt-data": "dapo-math-17k.jsonl"}, None),
        ("roll", {"actor_train.data_args.file_name": ["data/gsm8k.jsonl"]}, True),
        ("trinity", {"buffer.explorer_input.taskset.path": "openai/gsm8k", f"{SETS}.0.path": "openai/gsm8k"}, True),
    ],
)
def test_numbers_are_wanted_where_references_are_numbers(checked, framework, given, strict):
    found, problems = checked(framework, given)
    assert [each for each in problems if each != "nodes.reward.fn"] == []
    target = "nodes.reward.args.strict"
    listed = any(target in line.targets and line.status is Status.UNKNOWN for line in found.lines)
    assert found.tree.get(target, "listed" if listed else None) == strict


SAMPLED = {f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.n": 4, **VAL}
USUAL = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}


@pytest.mark.parametrize(
    ("framework", "given", "sampling", "n"),
    [
        ("verl", VAL, {}, None),
        ("verl", SAMPLED, {"temperature": 0, "max_new_tokens": 512}, None),
        (
            "verl",
            {**SAMPLED, f"{ROLLOUT}.val_kwargs.temperature": 0.6, f"{ROLLOUT}.val_kwargs.top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 512},
            4,
        ),
        ("slime", EVAL, {"max_new_tokens": 512}, None),
        (
            "slime",
            {**EVAL, "--n-samples-per-eval-prompt": 16, "--eval-top-p": 0.7, "--rollout-temperature": 0.8},
            {"temperature": 0.8, "top_p": 0.7, "max_new_tokens": 512},
            16,
        ),
        (
            "slime",
            {**EVAL, "--eval-max-response-len": 2048, "--eval-temperature": 0, "--n-samples-per-eval-prompt": 2},
            {"temperature": 0, "max_new_tokens": 2048},
            None,
        ),
        ("slime", {**EVAL, "--rollout-stop": "Q:"}, {"stop": ["Q:"], "max_new_tokens": 512}, None),
        ("roll", {"validation.data_args.file_name": "a.jsonl"}, {}, None),
        (
            "roll",
            {
                "validation.data_args.file_name": "a.jsonl",
                "validation.generating_args.top_p": 0.6,
                "validation.generating_args.num_return_sequences": 8,
            },
            {**USUAL, "top_p": 0.6, "max_new_tokens": 512},
            8,
        ),
        ("trinity", {f"{SETS}.0.path": "a/b", f"{SETS}.0.repeat_times": 3}, {"max_new_tokens": 512}, 3),
    ],
)
def test_responses_in_validation(checked, framework, given, sampling, n):
    found, problems = checked(framework, given)
    assert problems == []
    assert written(found, "nodes.rollout.val_sampling") == sampling
    assert found.tree.get("nodes.rollout.val_n") == n


def test_samples_of_roll_are_drawn_as_there(checked):
    found, problems = checked("roll", {"actor_infer.generating_args.top_k": 100})
    assert problems == []
    assert written(found, "nodes.rollout.sampling") == {**USUAL, "top_k": 100, "max_new_tokens": 512}


def test_each_validation_set_of_trinity_has_its_own_responses(checked):
    given = {
        "model.temperature": 0.9,
        f"{SETS}.0.path": "a/aime",
        f"{SETS}.0.name": "aime",
        f"{SETS}.0.repeat_times": 32,
        f"{SETS}.0.rollout_args.temperature": 1.0,
        f"{SETS}.1.path": "a/math",
        f"{SETS}.1.name": "math",
        f"{SETS}.1.rollout_args.max_tokens": 99,
        f"{SETS}.2.path": "a/greedy",
        f"{SETS}.2.name": "greedy",
        f"{SETS}.2.rollout_args.temperature": 0,
        f"{SETS}.2.repeat_times": 2,
        f"{SETS}.3.path": "a/amc",
        f"{SETS}.3.name": "amc",
        f"{SETS}.3.repeat_times": 32,
        f"{SETS}.3.rollout_args.temperature": 1.0,
    }
    found, problems = checked("trinity", given)
    assert problems == []
    assert written(found, "nodes.rollout.val_sampling") == {"temperature": 1.0, "max_new_tokens": 512}
    assert found.tree["nodes.rollout.val_n"] == 32
    assert written(found, "data.val.aime") == {"": "data/aime/train.parquet"}
    assert written(found, "data.val.amc") == {"": "data/amc/train.parquet"}
    assert written(found, "data.val.math") == {
        "path": "data/math/train.parquet",
        "n": 1,
        "sampling.temperature": 0.9,
        "sampling.max_new_tokens": 99,
    }
    greedy = written(found, "data.val.greedy")
    assert (greedy["sampling.temperature"], greedy["n"]) == (0, 1)
    assert not [line for line in found.lines if SETS in line.key and line.status is Status.REFUSED]


@pytest.mark.parametrize(
    ("framework", "key", "value"),
    [
        ("verl", "trainer.total_training_steps", Unresolved("$N", ("$N",))),
        ("trinity", "buffer.total_steps", Unresolved("$N", ("$N",))),
        ("slime", "--rollout-stop", Unresolved("$STOP", ("$STOP",))),
        ("roll", "actor_infer.generating_args.stop_strings", Unresolved("$STOP", ("$STOP",))),
        ("trinity", f"{SETS}.0.rollout_args.temperature", Unresolved("$T", ("$T",))),
    ],
)
def test_a_value_that_is_not_set_is_left_to_the_user(checked, framework, key, value):
    found, _ = checked(framework, {f"{SETS}.0.path": "a/aime", key: value} if SETS in key else {key: value})
    assert status_of(found, key) is Status.UNKNOWN


def test_a_name_that_is_null_leaves_the_trackers(checked):
    found, problems = checked("verl", {"trainer.experiment_name": None, "trainer.logger": ["console", "wandb"]})
    assert problems == []
    assert "wandb" in str(found.tree["track"])
