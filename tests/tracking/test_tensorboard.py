"""TensorBoard event files, read back as TensorBoard reads them."""

import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dagrl.tracking.base import SampleTable
from dagrl.tracking.tensorboard import TensorBoard


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def write(folder, steps, resumed_step=None, scale=1.0):
    tracker = TensorBoard()
    tracker.start(folder, {"name": "tiny", "run": {"steps": 4}}, resumed_step)
    for step in steps:
        tracker.log(step, {"reward/mean": step * scale})
    tracker.close(ok=True)


def scalars(folder) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars("reward/mean")]


def test_scalars_and_the_pipeline_are_there(tmp_path):
    write(tmp_path, [1, 2])
    assert scalars(tmp_path) == [(1, 1.0), (2, 2.0)]
    (text,) = read(tmp_path).Tensors("pipeline/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "```yaml\nname: tiny\nrun:\n  steps: 4\n```"


def test_a_run_need_not_import_torch_for_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from dagrl.tracking.tensorboard import TensorBoard\n"
        f"tracker = TensorBoard(); tracker.start(Path({str(tmp_path)!r}), {{}}, None)\n"
        "tracker.log(1, {'reward/mean': float('nan')}); tracker.close(ok=True)\n"
        "print({'torch', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_samples_are_a_table_of_single_lines(tmp_path):
    tracker = TensorBoard()
    tracker.start(tmp_path, {}, None)
    tracker.samples(1, SampleTable(("prompt", "reward"), (("1|1\n2", 1.0),)))
    tracker.close(ok=True)
    (text,) = read(tmp_path).Tensors("val/samples/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "| prompt | reward |\n| --- | --- |\n| 1\\|1 ↵ 2 | 1.0 |"


def test_a_step_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    tracker = TensorBoard()
    tracker.start(tmp_path, {}, None)
    tracker.log(1, {"reward/mean": 0.5})
    assert scalars(tmp_path) == [(1, 0.5)]
    tracker.close(ok=False)


@pytest.mark.parametrize(("resumed_step", "kept"), [(2, [(1, 1.0), (2, 2.0)]), (None, [])])
def test_steps_done_again_replace_the_old_ones(tmp_path, resumed_step, kept, monkeypatch):
    write(tmp_path, [1, 2, 3, 4])
    # Event files are read in the order of their names, which begin with the second they were made in.
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10)
    write(tmp_path, [3], resumed_step, scale=10.0)
    assert scalars(tmp_path) == [*kept, (3, 30.0)]


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write .*/tensorboard: "):
        TensorBoard().start(tmp_path, {}, None)
