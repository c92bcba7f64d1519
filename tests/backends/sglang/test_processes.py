"""SGLang runs no code of a model's folder."""

from __future__ import annotations

import importlib.util
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dagrl.backends.sglang.processes import keep_code_out

# Not imported here: in a process that also has Megatron, that is imported first.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_loader import weight_utils
    from transformers import dynamic_module_utils

    for module, name in ((weight_utils, "_load_pt_file"), (dynamic_module_utils, "get_class_in_module")):
        monkeypatch.setattr(module, name, getattr(module, name))


def test_weights_in_the_oldest_format_are_not_unpickled(tmp_path: Path) -> None:
    from sglang.srt.model_loader import weight_utils

    mark, file = tmp_path / "was_here", tmp_path / "pytorch_model.bin"
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            content = pickle.dumps(Evil(mark))
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    keep_code_out(trusted=True)
    with pytest.raises(RuntimeError, match="legacy"):
        list(weight_utils.pt_weights_iterator([str(file)]))
    assert not mark.exists()


def test_python_files_of_the_folder_are_not_imported(tmp_path: Path) -> None:
    from sglang.srt.model_loader.utils import get_class_from_dynamic_module

    mark = tmp_path / "was_here"
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\n\nclass Own: pass\n")
    keep_code_out(trusted=False)
    with pytest.raises(ValueError, match="which is not run"):
        get_class_from_dynamic_module("code.Own", str(tmp_path))
    assert not mark.exists()
