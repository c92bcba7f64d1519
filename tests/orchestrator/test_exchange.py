"""Waits, batches and errors of explorers and trainers, without engines."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dagrl.config.share import Share
from dagrl.data.batch import Batch, Column
from dagrl.data.experience import Experience, Origin, write_experience
from dagrl.model_files.fingerprint import model_fingerprint, tokenizer_fingerprint
from dagrl.orchestrator.exchange import Explorer, Trainer, open_exchange
from dagrl.orchestrator.folder.checkpoint import Checkpoints, RunState
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.validation.part import PartOptions
from dagrl.validation.prepare import prepare
from dagrl.workers.errors import RefusedFolderError, RunError

COLUMNS = (
    *("answer", "data_set", "data_source", "finish_reason", "policy_version", "prompt_tokens", "response_mask"),
    *("response_tokens", "reward", "rollout_logprob"),
)


class Parts:
    """Explorers and trainers of one pipeline, and the folder that they share."""

    def __init__(self, project, folder: Path) -> None:
        self.project, self.folder = project, folder

    def part(self, only, *overrides, step=0, used=None, share="1/1", run="trainer"):
        prepared = prepare(
            self.project.folder / "p.yaml",
            ["run.node_timeout_s=0.4", *overrides],
            part=PartOptions(tuple(only), Share.parse(share)),
        )
        path = self.folder / run
        state = RunState(step, 0, "", experience=used or {}) if step else None
        folder = RunFolder(path, Checkpoints(path, 3), state, None)
        return open_exchange(prepared, folder, self.folder / "experience")

    def trainer(self, *overrides, **options) -> Trainer:
        return self.part(("advantage", "update"), *overrides, **options)

    def explorer(self, *overrides, **options) -> Explorer:
        return self.part(("rollout", "reward"), *overrides, run="explorer", **options)

    def put(self, explorer: str, *numbers: int, without=(), **origin) -> None:
        """Batches as an explorer writes them."""
        part = self.trainer()
        model = part.pipeline.model
        fields = {"model": model_fingerprint(model), "tokenizer": tokenizer_fingerprint(model), "group_size": 4}
        batch = Batch(np.arange(4), {name: Column(np.zeros(4)) for name in COLUMNS if name not in without})
        for number in numbers:
            filled = Origin(explorer=explorer, step=number, **(fields | origin))
            write_experience(part.files.batch(explorer, number), Experience(batch, np.arange(4)), filled)

    def publish(self, version: int, **used: int) -> None:
        files = self.trainer().files
        (files.unpublished_weights(version) / "actor").mkdir(parents=True)
        files.publish_weights(version, used)


@pytest.fixture
def parts(project, tmp_path) -> Parts:
    return Parts(project, tmp_path)


def begins(part, step: int) -> bool:
    return asyncio.run(part.begin(step))


class TestTrainer:
    def test_it_takes_each_batch_once_the_oldest_first(self, parts):
        parts.put("1of2", 1, 2, 3)
        parts.put("2of2", 1)
        trainer, taken = parts.trainer(), []
        for age, (explorer, number) in enumerate((("1of2", 3), ("1of2", 2), ("2of2", 1), ("1of2", 1))):
            os.utime(trainer.files.batch(explorer, number), (1e9 - age, 1e9 - age))
        for step in range(1, 5):
            assert begins(trainer, step)
            taken.append(trainer.file(step)[0].name)
        assert taken == [f"{name}.parquet" for name in ("1of2-000001", "2of2-000001", "1of2-000002", "1of2-000003")]
        assert trainer.used(2) == {"1of2": 1, "2of2": 1} and trainer.used(4) == {"1of2": 3, "2of2": 1}

    def test_it_goes_on_behind_the_batches_of_its_checkpoint(self, parts):
        parts.put("1of1", 1, 2, 3)
        trainer = parts.trainer(step=2, used={"1of1": 2})
        assert begins(trainer, 3) and trainer.file(3)[0].name == "1of1-000003.parquet"

    def test_it_waits_for_a_batch_that_a_listing_lacks(self, parts):
        parts.put("1of1", 2, 3)
        with pytest.raises(RunError, match="for a batch of experience"):
            begins(parts.trainer(), 1)

    def test_it_ends_when_all_explorers_have_and_all_is_used(self, parts):
        parts.put("1of2", 1)
        parts.put("2of2", 1)
        trainer = parts.trainer()
        trainer.files.note_explorer("1of2", parts.folder, ended=True)
        trainer.files.note_explorer("2of2", parts.folder, ended=True)
        assert [begins(trainer, step) for step in (1, 2, 3)] == [True, True, False]

    def test_it_ends_when_explorers_have_ended_and_used_batches_were_removed(self, parts):
        trainer = parts.trainer(step=2, used={"1of1": 2})
        trainer.files.note_explorer("1of1", parts.folder, ended=True)
        assert not begins(trainer, 3)

    def test_a_request_to_stop_ends_a_wait(self, parts):
        trainer = parts.trainer()
        trainer.stop_requested = True
        assert not begins(trainer, 1)

    def test_a_wait_without_explorers_says_so(self, parts):
        with pytest.raises(RunError) as caught:
            begins(parts.trainer(), 1)
        assert "no explorer is running" in caught.value.cause and str(parts.folder) in caught.value.cause

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"model": "other"}, "another model"),
            ({"tokenizer": "other"}, "another tokenizer"),
            ({"group_size": 8}, "8 samples of each prompt"),
            ({"without": ("reward",)}, "no column `reward`, which `advantage`"),
        ],
    )
    def test_experience_of_another_pipeline_is_refused_before_the_start(self, parts, options, words):
        parts.put("1of1", 1, **options)
        with pytest.raises(RefusedFolderError, match=words) as caught:
            parts.trainer().check()
        assert caught.value.hint

    def test_experience_of_another_pipeline_is_refused_when_it_comes(self, parts):
        trainer = parts.trainer()
        trainer.check()
        parts.put("1of1", 1, model="other")
        with pytest.raises(RunError, match="another model"):
            begins(trainer, 1)

    def test_a_second_trainer_is_refused_unless_it_writes_no_weights(self, parts):
        parts.trainer().check()
        parts.put("1of1", 1)
        with pytest.raises(RefusedFolderError, match="is trained on the experience"):
            parts.trainer(run="second").check()
        parts.trainer("schedule.weights_every=0", run="second").check()
        parts.trainer().check()

    def test_an_empty_folder_is_refused_where_nothing_comes(self, parts):
        with pytest.raises(RefusedFolderError, match="no experience"):
            parts.trainer("schedule.weights_every=0").check()


class TestExplorer:
    def test_it_waits_until_its_last_batch_is_in_the_weights(self, parts):
        explorer = parts.explorer()
        assert begins(explorer, 1)
        asyncio.run(explorer.commit(1))
        parts.put("1of1", 1)
        with pytest.raises(RunError, match="for the trainer to publish weights"):
            begins(explorer, 2)
        parts.publish(1, **{"1of1": 1})
        assert begins(explorer, 2)

    @pytest.mark.parametrize(("staleness", "share", "begun"), [(0, "1/1", 1), (2, "1/1", 3), (2, "2/3", 1)])
    def test_no_batch_begins_that_would_be_too_old(self, parts, staleness, share, begun):
        explorer = parts.explorer(f"schedule.max_staleness={staleness}", share=share)
        for step in range(1, begun + 1):
            assert begins(explorer, step)
        with pytest.raises(RunError):
            begins(explorer, begun + 1)

    def test_it_ends_when_the_trainer_has(self, parts):
        parts.trainer().close(finished=True)
        assert not begins(parts.explorer(), 1)

    def test_it_publishes_what_was_saved_before_it_was_killed(self, parts):
        explorer = parts.explorer(step=3)
        aside, _ = explorer.file(3)
        aside.parent.mkdir(parents=True)
        aside.write_text("x")
        explorer.check()
        assert explorer.files.batches() == {"1of1": {3: explorer.files.batch("1of1", 3)}}

    def test_batches_that_its_run_folder_does_not_know_are_refused(self, parts):
        parts.put("1of1", 1, 2)
        with pytest.raises(RefusedFolderError, match="batch 2 of explorer 1of1"):
            parts.explorer(step=1).check()
        parts.explorer(step=2).check()


def test_a_second_explorer_of_the_same_number_is_refused(parts):
    first = parts.explorer()
    first.check()
    parts.explorer().check()
    with pytest.raises(RefusedFolderError, match="explorer 1of1") as caught:
        parts.part(("rollout", "reward"), run="other").check()
    assert "--explorer" in caught.value.hint
    first.close(finished=True)
    parts.part(("rollout", "reward"), run="other").check()


def test_start_weights_of_another_folder_are_waited_for(parts):
    explorer = parts.explorer()
    prepared = prepare(parts.project.folder / "p.yaml", part=PartOptions(("rollout", "reward")))
    assert explorer.prepare(prepared) is prepared
    engines = explorer.pipeline.engines
    actor = engines["actor"].model_copy(update={"dist_checkpointing_path": Path("/weights")})
    explorer.pipeline = explorer.pipeline.model_copy(update={"engines": {**engines, "actor": actor}})
    with pytest.raises(RunError, match="the start weights of `actor`"):
        explorer.prepare(prepared)
    parts.publish(0)
    started = explorer.prepare(replace(prepared))
    assert started.loaded.pipeline.engines["generator"].model.path.name == "actor"


def test_weights_that_are_removed_while_they_are_read_are_followed_by_newer_ones(parts):
    explorer, loaded = parts.explorer(), []

    class Generator:
        async def call_all(self, what: str, method: object, folder: str, version: int) -> None:
            loaded.append((Path(folder).name, version))
            if version == 1:
                explorer.files.remove_weights_after(0)
                parts.publish(4)
                raise RunError("a file is missing")

    parts.publish(1)
    asyncio.run(explorer.load_weights("generator", {"generator": Generator()}))
    asyncio.run(explorer.load_weights("generator", {"generator": Generator()}))
    assert loaded == [("actor", 1), ("actor", 4)]
    assert explorer.policy_version(1) == 4
    explorer.forget("generator")
    asyncio.run(explorer.load_weights("generator", {"generator": Generator()}))
    assert loaded[2:] == [("actor", 4)]
