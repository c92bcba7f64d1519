"""Folders in Megatron's format: what is read of them, and what is refused."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint: a matrix, and a tensor of three layers."""
    import torch

    from dagrl.backends.megatron.stored.stored_writer import TensorToWrite, write_tensors

    layers = torch.arange(24.0).reshape(3, 2, 4).bfloat16()
    write_tensors(
        tmp_path,
        {
            "matrix": TensorToWrite((2, 3), torch.float32, {(): lambda: torch.arange(6.0).reshape(2, 3)}),
            "layers.weight": TensorToWrite(
                (3, 2, 4), torch.bfloat16, {(i,): (lambda i=i: layers[i]) for i in range(3)}
            ),
            "optimizer.state.exp_avg.matrix": TensorToWrite((1,), torch.float32, {(): lambda: torch.zeros(1)}),
        },
        {"iteration": 3},
    )
    return tmp_path


def test_whole_tensors_and_parts_are_read_in_their_dtype(folder: Path) -> None:
    import torch

    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    stored = StoredTensors(folder)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.weights().items()} == {
        "matrix": ((2, 3), torch.float32),
        "layers.weight": ((3, 2, 4), torch.bfloat16),
    }
    assert torch.equal(stored.read("matrix"), torch.arange(6.0).reshape(2, 3))
    part = stored.read("layers.weight", (1,))
    assert part.dtype is torch.bfloat16
    assert part.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert stored.read("layers.weight", (2, 1)).tolist() == [20, 21, 22, 23]


def test_megatron_reads_what_is_written_here(folder: Path) -> None:
    from megatron.core.dist_checkpointing import load_common_state_dict, load_tensors_metadata

    assert load_common_state_dict(folder) == {"iteration": 3}
    assert load_tensors_metadata(folder)["layers.weight"].global_shape == (3, 2, 4)


def test_the_newest_of_megatrons_own_folders_is_found(tmp_path: Path) -> None:
    from dagrl.backends.megatron.stored_folder import newest_checkpoint

    assert newest_checkpoint(tmp_path) == tmp_path
    for said, name in (("120", "iter_0000120"), ("release\n", "release")):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(said)
        assert newest_checkpoint(tmp_path) == tmp_path / name


def test_a_folder_that_is_no_checkpoint_is_refused_in_a_sentence(folder: Path) -> None:
    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    def refusal(path: Path = folder) -> str:
        with pytest.raises(ValueError) as caught:
            StoredTensors(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refusal(folder / "gone").startswith(f"{folder / 'gone'} does not exist; give a folder in Megatron's")
    description = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(description[: len(description) // 2])
    assert f"cannot read {folder / '.metadata'}" in refusal()
    (folder / ".metadata").write_bytes(pickle.dumps({}))
    assert "it holds a dict; copy the folder again" in refusal()
    (folder / ".metadata").unlink()
    assert refusal() == f"{folder} has no .metadata, which says where each tensor is stored; copy it again"
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert refusal() == f"{folder} is in the format zarr; save it as torch_dist (Megatron's `--ckpt-format`)"
    for torn in (b"{", b"\xff", b"[]", b"null", b'{"sharded_backend": 3}', b"[" * 100_000):
        (folder / "metadata.json").write_bytes(torn)
        assert "is in the format of no readable metadata.json" in refusal()
    (folder / "metadata.json").unlink()
    assert "has no metadata.json, so it is no checkpoint" in refusal()


@pytest.mark.parametrize("seed", range(4))
def test_wrong_bytes_in_a_description_end_in_a_sentence(folder: Path, seed: int) -> None:
    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    whole = (folder / ".metadata").read_bytes()
    draw = random.Random(seed)
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 5))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        (folder / ".metadata").write_bytes(content)
        try:
            stored = StoredTensors(folder)
            for name in stored.tensors:
                stored.read(name)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


@pytest.mark.parametrize("said", ["x", "²", "9" * 5000, "-5", "../..", "a\0b", "12 13"])
def test_the_newest_folder_is_a_number_or_a_release(tmp_path: Path, said: str) -> None:
    from dagrl.backends.megatron.stored_folder import newest_checkpoint

    (tmp_path / "latest_checkpointed_iteration.txt").write_text(said)
    with pytest.raises(ValueError, match="should say an iteration's number or `release`; correct it"):
        newest_checkpoint(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/dagrl_was_here"),)


def test_a_description_that_runs_code_is_refused_and_does_not_run(folder: Path) -> None:
    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    mark = Path("/tmp/dagrl_was_here")
    for evil in (Evil(), {"nested": [Evil()]}):
        (folder / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(ValueError, match="would run code when read"):
            StoredTensors(folder)
    for code in (b"ctorch\nload\n.", b"ctorch.distributed.checkpoint.metadata\nos.system\n."):
        (folder / ".metadata").write_bytes(code)
        with pytest.raises(ValueError, match="would run code when read"):
            StoredTensors(folder)
    assert not mark.exists()


def test_tensors_that_cannot_be_read_are_named(folder: Path) -> None:
    from dagrl.backends.megatron.stored.stored_tensors import StoredTensors

    stored = StoredTensors(folder)
    with pytest.raises(ValueError, match="has no tensor 'other'"):
        stored.read("other")
    (folder / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match="cannot read tensor 'matrix'"):
        stored.read("matrix")
