import json
from pathlib import Path

import pytest

from dagrl.cli import main

SCRIPT = """
BATCH=${BATCH:-8}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=null \\
    data.train_batch_size=$BATCH data.max_prompt_length=64 data.max_response_length=64 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    actor_rollout_ref.rollout.n=${N:?} trainer.total_training_steps=10 trainer.n_gpus_per_node=2 trainer.nnodes=1 \\
    trainer.no_such_key=1 "$@"
"""
ROW = {"prompt": "1+1=", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([ROW] * 16), tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def test_prints_what_became_of_each_setting_and_the_plan(script, capsys):
    main(["import", str(script), "--set", "N=4", "actor_rollout_ref.actor.optim.lr=2e-6"])
    out = capsys.readouterr().out
    for line in (
        f"  {script}:4: data.train_batch_size = 8 -> data.prompts_per_step",
        "  command line:1: actor_rollout_ref.actor.optim.lr = 2e-06 -> engines.actor.optimizer.lr",
        f"  {script}:8: trainer.no_such_key = 1: no key of verl 0.9 that dagrl knows",
        "Wrote pipeline.yaml",
    ):
        assert line in out.splitlines()
    assert "memory of GPU" in out or "GiB" in out
    assert "n: 4" in Path("pipeline.yaml").read_text()


def test_json_is_one_object(script, capsys):
    code = main(["import", str(script), "-o", "p.yaml", "--json", "--set", "N=4"])
    found = json.loads(capsys.readouterr().out)
    assert found["framework"] == "verl"
    assert found["counts"]["unknown"] == 1
    (line,) = [line for line in found["lines"] if line["key"] == "data.train_batch_size"]
    assert (line["place"], line["targets"]) == (f"{script}:4", ["data.prompts_per_step"])
    assert code == (2 if any(": " in each and each.startswith("p.yaml") for each in found["validate"]) else 0)


def test_problems_of_the_pipeline_are_printed_and_exit_with_2(script, capsys):
    assert main(["import", str(script), "--set", "N=4", "data.train_files=none.parquet"]) == 2
    assert "none.parquet does not exist" in capsys.readouterr().out


def test_no_function_of_the_script_is_imported(script, capsys):
    Path("my_reward.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\ndef compute_score(response, answer): ...\n"
    )
    own = ["custom_reward_function.path=my_reward.py", "custom_reward_function.name="]
    main(["import", str(script), "--set", "N=4", own[0], own[1] + "compute_score"])
    assert "my_reward" not in capsys.readouterr().out.rpartition("Wrote pipeline.yaml")[2]
    assert main(["import", str(script), "-o", "p.yaml", "--set", "N=4", own[0], own[1] + "other"]) == 2
    assert "has no function 'other'" in capsys.readouterr().out
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.sh"], "cannot be read"),
        (["run.sh", "-o", "run.sh"], "exists"),
        (["run.sh", "-o", "dangling"], "exists"),
        (["run.sh", "-o", "no/p.yaml"], "cannot be written"),
        (["run.sh", "--set", "N"], "NAME=VALUE"),
        (["run.sh", "--from", "other"], "--from takes"),
        (["train.parquet"], "is not a text"),
    ],
)
def test_wrong_calls_are_one_sentence(script, capsys, arguments, said):
    Path("dangling").symlink_to("elsewhere.yaml")
    assert main(["import", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not Path("pipeline.yaml").exists()
    assert not Path("elsewhere.yaml").exists()
