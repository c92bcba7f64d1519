from pathlib import Path

import pytest

from dagrl.orchestrator.folder.experience import ExperienceFolder


@pytest.fixture
def files(tmp_path) -> ExperienceFolder:
    return ExperienceFolder(tmp_path / "experience")


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def test_a_batch_is_seen_once_it_is_published(files):
    put(files.unpublished("1of2", 1))
    assert files.batches() == {}
    files.publish("1of2", 1)
    files.publish("1of2", 1)
    assert files.batches() == {"1of2": {1: files.batch("1of2", 1)}}
    # A step that runs again does not replace what was published.
    put(files.unpublished("1of2", 1))
    files.batch("1of2", 1).write_text("first")
    files.publish("1of2", 1)
    assert files.batch("1of2", 1).read_text() == "first"


def test_other_files_are_no_batches(files):
    for name in (".1of1-000001.parquet.unpublished", "..x-1.parquet", "notes.txt", "1of1.parquet", "1of1-x.parquet"):
        put(files.path / "batches" / name)
    put(files.batch("host-2of3", 12))
    assert {name: [*numbers] for name, numbers in files.batches().items()} == {"host-2of3": [12]}


def test_the_newest_weights_replace_old_ones_but_the_first(files):
    assert files.weights() is None
    for version in range(6):
        put(files.unpublished_weights(version) / "actor" / "model.safetensors")
        files.publish_weights(version, {"1of1": version})
        newest = files.weights()
        assert newest and (newest.version, newest.used) == (version, {"1of1": version})
    folders = {path.name for path in (files.path / "weights").iterdir()}
    assert folders == {"version_0", "version_3", "version_4", "version_5"}
    assert (newest.folder / "actor" / "model.safetensors").is_file()


def test_a_trainer_that_goes_back_takes_its_weights_back(files):
    for version in (1, 2, 3):
        put(files.unpublished_weights(version) / "actor" / "x")
        files.publish_weights(version, {})
    put(files.unpublished_weights(4) / "actor" / "x")
    earlier = files.weights(2)
    files.remove_unpublished_weights()
    files.remove_weights_after(1)
    assert {path.name for path in (files.path / "weights").iterdir()} == {"version_1"}
    put(files.unpublished_weights(2) / "actor" / "x")
    files.publish_weights(2, {})
    assert files.weights() != earlier, "explorers load version 2 again"


def test_weights_without_their_last_file_are_not_there(files):
    put(files.path / "weights" / "version_3" / "actor" / "model.safetensors")
    assert files.weights() is None


def test_parts_know_of_each_other(files, tmp_path):
    assert files.trainer() == ("", False) and files.explorers() == {}
    files.note_trainer(tmp_path / "run", ended=False)
    files.note_explorer("1of2", tmp_path / "one", ended=False)
    files.note_explorer("2of2", tmp_path / "two", ended=True)
    assert files.trainer() == (str(tmp_path / "run"), False)
    assert files.explorers() == {"1of2": (str(tmp_path / "one"), False), "2of2": (str(tmp_path / "two"), True)}
