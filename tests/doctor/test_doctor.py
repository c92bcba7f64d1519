"""What the doctor says of machines of all kinds; and of this one, for its edges."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dagrl.doctor import command
from dagrl.doctor.probe import Edges, Gpu

GIB = 2**30
H200 = Gpu("0", "NVIDIA H200", 143771, 4, "570.124")
SEEN = {"version": "2.11.0", "cuda": "12.9", "available": True, "count": 1, "nccl": True}


class Machine(Edges):
    """A machine with one idle H200 where all is well, unless it is told otherwise."""

    def __init__(self, **changed):
        self._changed = changed

    def __getattribute__(self, name):
        changed = object.__getattribute__(self, "__dict__").get("_changed", {})
        if name == "variables":
            return changed.get(name, {})
        if name in WELL:
            value = changed.get(name, WELL[name])
            return lambda *arguments: value(*arguments) if callable(value) else value
        return object.__getattribute__(self, name)


def imports(**errors: str):
    """What modules say of themselves, where some cannot be imported."""
    return lambda *modules: [
        (name, {"error": errors[name]} if name in errors else (SEEN if name == "torch" else {"version": "1"}))
        for name in modules
    ]


def examine(machine: Edges) -> tuple[str, int]:
    """What the doctor says, and its exit code."""
    said: list[str] = []
    code = command.examine(machine, said.append)
    return "\n".join(said), code


WELL = {
    "python": (3, 12, 1),
    "system": "Linux 6.8 x86_64",
    "requirements": ["ray<2.61,>=2.60", 'sglang==0.5.17; extra == "sglang"'],
    "version": lambda package: "2.60.0",
    "imports": imports(),
    "gpus": [H200],
    "gpu_processes": [],
    "cpus": 16,
    "memory_bytes": 128 * GIB,
    "room_bytes": lambda folder: (900 * GIB, 1000 * GIB),
    "temporary": "/tmp",
    "limits": {"files": 65536, "processes": -1, "locked": -1},
    "unconfined": None,
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "infiniband": ["mlx5_0 port 1 4: ACTIVE"],
    "can_listen": lambda port: True,
    "resolves": lambda host: True,
    "running_ray": None,
    "silence_at": lambda address: None,
}


def test_a_machine_where_all_is_well_has_only_ok_lines():
    said, code = examine(Machine())
    assert (code, said.splitlines()[-1]) == (0, "0 missing, 0 hints")
    assert "  ok       GPU 0                  NVIDIA H200, 140 GiB, driver 570.124" in said.splitlines()
    assert {line.split()[0] for line in said.splitlines()[:-1] if line.startswith("  ")} == {"ok"}


def test_each_thing_is_said_before_the_next_is_looked_at():
    said: list[str] = []
    before: list[int] = []

    def slowly(*modules: str):
        for name in modules:
            before.append(len(said))
            yield name, SEEN

    command.examine(Machine(imports=slowly), said.append)
    assert said[before[0] - 2].split()[:2] == ["ok", "Python"]
    assert before[1] > before[0] and said[before[1] - 2].split()[:3] == ["ok", "import", "torch"]


JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "node0"}
BUSY = Gpu("0", "NVIDIA H200", 143771, 40960, "570.124")


@pytest.mark.parametrize(
    ("changed", "verdict", "fragment"),
    [
        ({"python": (3, 11, 9)}, "missing", "3.11.9; dagrl needs 3.12"),
        ({"version": lambda package: None}, "missing", "not installed; dagrl needs"),
        ({"version": lambda package: "2.59.0"}, "missing", "2.59.0; dagrl needs"),
        (
            {"unconfined": "the kernel has no Landlock"},
            "hint",
            "the kernel has no Landlock; only `fn: code` and the tool",
        ),
        ({"requirements": []}, "hint", "not installed as a package"),
        (
            {"imports": imports(torch="ImportError: libcudart.so.12")},
            "missing",
            "cannot be imported: ImportError: libc",
        ),
        ({"imports": imports(transformer_engine="ModuleNotFoundError")}, "missing", "needs Transformer Engine on GPUs"),
        ({"imports": imports(apex="ModuleNotFoundError")}, "hint", "fused gradient accumulation is left out"),
        ({"imports": imports(sglang="ModuleNotFoundError")}, "hint", "only `backend: sglang` needs it"),
        (
            {"imports": lambda *names: [(name, {"version": "1", "available": False, "cuda": None}) for name in names]},
            "missing",
            "there are GPUs and torch, built without CUDA, sees none",
        ),
        ({"gpus": [BUSY]}, "hint", "driver 570.124; 40.0 GiB are in use"),
        ({"gpu_processes": ["pid 7 (python, 9 MiB)"]}, "hint", "held by pid 7 (python, 9 MiB)"),
        ({"room_bytes": lambda folder: (GIB, 2 * GIB)}, "hint", "1.0 of 2 GiB free in /dev/shm; with Docker say --shm"),
        ({"room_bytes": lambda folder: None}, "missing", "there is no /dev/shm"),
        ({"limits": {"files": 1024, "processes": -1, "locked": -1}}, "hint", "at most 1024; Ray and many workers want"),
        ({"limits": {"files": -1, "processes": -1, "locked": 8 << 20}}, "hint", "at most 8 MiB; InfiniBand wants"),
        ({"interfaces": {"lo": ["127.0.0.1"]}}, "hint", "none but the loopback"),
        ({"variables": {"NCCL_SOCKET_IFNAME": "ib9"}}, "missing", "names ib9, which this machine has not"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": "0"}}, "hint", "is `0`; runs see these GPUs only"),
        ({"infiniband": ["mlx5_0 port 1 1: DOWN"]}, "hint", "not active: mlx5_0 port 1 1: DOWN"),
        ({"infiniband": []}, "hint", "NCCL goes over TCP between machines"),
        ({"running_ray": "10.0.0.1:6379"}, "hint", "one runs on this machine at 10.0.0.1:6379"),
        ({"variables": {"RAY_ADDRESS": "10.0.0.9:6379"}}, "hint", "RAY_ADDRESS is 10.0.0.9:6379"),
        (
            {"variables": {"RAY_ADDRESS": "local"}, "running_ray": "10.0.0.1:6379"},
            "ok",
            "RAY_ADDRESS is local: a run starts its own",
        ),
        (
            {"variables": {"RAY_ADDRESS": "10.0.0.9:6379"}, "silence_at": lambda address: "Connection refused"},
            "missing",
            "RAY_ADDRESS is 10.0.0.9:6379, where nobody answers (Connection refused); unset it",
        ),
        ({"variables": {"RAY_ADDRESS": "ray://h:10001"}}, "missing", "where Ray's client is served"),
        ({"variables": {"PET_NNODES": "two"}}, "missing", "PET_NNODES is `two`; set it to a whole number of 1 or more"),
        ({"variables": JOB}, "ok", "rank 0 of 2 machines, rank 0 at node0:29500"),
        ({"variables": JOB, "resolves": lambda host: False}, "missing", "the name node0 leads to no address"),
        ({"variables": JOB, "can_listen": lambda port: False}, "missing", "the port is taken"),
    ],
)
def test_each_thing_has_its_line(changed, verdict, fragment):
    said, code = examine(Machine(**changed))
    assert any(line.split()[0] == verdict and fragment in line for line in said.splitlines()), said
    assert code == ("  missing " in said) == (verdict == "missing")


@pytest.mark.parametrize("chosen", ["eth", "=eth0", "eth0,lo", "^docker0", "^lo,docker"])
def test_interfaces_that_are_chosen_must_be_there_and_others_need_not(chosen: str):
    assert examine(Machine(variables={"NCCL_SOCKET_IFNAME": chosen}))[1] == 0


def test_without_gpus_what_only_they_need_is_not_asked_for():
    said, code = examine(Machine(gpus=[], imports=imports(transformer_engine="no", apex="no"), infiniband=[]))
    assert code == 0
    assert "groups of CPU slots (cpus_per_node) run here, groups of GPUs do not" in said
    assert "transformer_engine" not in said and "InfiniBand" not in said


def test_modules_are_tried_in_a_process_that_may_crash(tmp_path: Path, monkeypatch):
    (tmp_path / "sound.py").write_text("__version__ = '1.2'")
    (tmp_path / "broken.py").write_text("raise OSError('libfoo.so: cannot open shared object file')")
    (tmp_path / "deadly.py").write_text("import os; os._exit(11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert dict(Edges().imports("sound", "broken", "deadly", "sys")) == {
        "sound": {"version": "1.2"},
        "broken": {"error": "OSError: libfoo.so: cannot open shared object file"},
        "deadly": {"error": "ends Python (exit code 11)"},
        "sys": {"error": "not tried, as deadly ends Python (exit code 11)"},
    }


def test_the_driver_of_gpus_is_asked_in_its_own_words(tmp_path: Path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in *gpu=*) echo "0, NVIDIA H200, 143771, 4, 570.124";; '
        '*) echo "77, python, 1000";; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert Edges().gpus() == [H200]
    assert Edges().gpu_processes() == ["pid 77 (python, 1000 MiB)"]
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert Edges().gpus() == []


def test_it_looks_at_this_machine_without_torch_and_its_kin(tmp_path: Path):
    """Packages that cannot be imported are lines, not tracebacks."""
    for name in ("torch", "ray", "transformers", "psutil", "sglang"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-m", "dagrl.cli", "doctor"],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "torch                  cannot be imported: ImportError: not here" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("4 missing")
