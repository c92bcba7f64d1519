"""What a machine does before it meets the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagrl.config.loading.hub import HubError
from dagrl.config.loading.loader import load_pipeline
from dagrl.config.share import Share
from dagrl.launcher import command
from dagrl.launcher.errors import LaunchError
from dagrl.launcher.job import Job
from dagrl.validation.part import PartOptions


def test_weights_that_cannot_be_fetched_end_the_launch_with_a_sentence(project, monkeypatch) -> None:
    def fail(pipeline: object) -> bool:
        raise HubError("the Hub cannot be reached")

    monkeypatch.setattr(command, "download", fail)
    with pytest.raises(LaunchError, match="the Hub cannot be reached") as caught:
        command.fetch_models(load_pipeline(project.pipeline()).pipeline)
    assert caught.value.code == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_is_launched_with_its_groups_and_options(lab, tmp_path: Path, monkeypatch, rank: int) -> None:
    jobs = list[Job]()

    async def meet(job: Job) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr(command, "lead", meet)
    monkeypatch.setattr(command, "follow", meet)
    variables = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29511",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pipeline = lab.tiny_pipeline()
    pipeline["groups"] = {"train": {"cpus_per_node": 1}, "rollout": {"cpus_per_node": 2}}
    pipeline["engines"]["actor"]["group"], pipeline["engines"]["generator"]["group"] = "train", "rollout"
    pipeline["schedule"] = {"max_staleness": 2}
    path, run = lab.write_pipeline(tmp_path, pipeline), tmp_path / "run"
    for only, share in ((("rollout", "reward"), Share(1, 3)), (("advantage", "update"), Share())):
        assert command.launch_pipeline(path, [], run, PartOptions(only, share), tmp_path / "shared") == 0
    explorer, trainer = jobs
    shared = ["--experience", str(tmp_path / "shared")]
    assert explorer.arguments == [
        *(str(path), "--run-dir", str(run), "--only", "rollout,reward", "--explorer", "1/3", *shared)
    ]
    assert trainer.arguments == [str(path), "--run-dir", str(run), "--only", "advantage,update", *shared]
    assert [list(job.pipeline.groups) for job in jobs] == [["rollout"], ["train"]]
    assert [job.logs.parent.name for job in jobs] == ["run-explorer-1of3", "run"]


def test_a_part_that_is_not_there_ends_the_launch(lab, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "10.0.0.1")
    path = lab.write_pipeline(tmp_path, lab.tiny_pipeline())
    with pytest.raises(LaunchError, match="there is no node `nothing`") as caught:
        command.launch_pipeline(path, [], None, PartOptions(("nothing",)))
    assert caught.value.code == 2
