"""What a run has come to, out of its folder."""

import json
import re
from pathlib import Path

import pytest

from dagrl.reporting.run_data.run_reader import RunReader, read_run
from dagrl.reporting.summary import summary, summary_values
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tables import render
from dagrl.tracking.timeline import Timeline


def said(run: RunReader, idle: dict[str, float], steps: int | None = None) -> str:
    return render(summary(run, idle, steps))


def write(folder: Path, *steps: dict, end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + end)
    return folder


def step(number: int, **metrics: float) -> dict:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": number, "time/step_s": 10.0, "time/rollout_s": 6.0, "time/update_s": 2.0, **named}


def words(line: str) -> list[str]:
    return line.split()


def told(folder: Path, about: str) -> list[str]:
    """The line of the summary that begins so, in words."""
    lines = said(read_run(folder), {}).splitlines()
    return next(words(line) for line in lines if line.strip().startswith(about))


def test_rewards_and_pass_rates_of_sources_are_printed(tmp_path):
    of_sums = {"train__sums__reward__mean": 0.5, "train__sums__pass_rate": 0.25, "train__sums__entropy": 1.5}
    folder = write(
        tmp_path / "run",
        step(1, reward__mean=0.25, **of_sums, train__sums__reward__std=0.1),
        # A step need not have prompts of each source.
        step(2, reward__mean=0.75, train__code__reward__mean=-1.0, train__code__pass_rate=0.0),
        step(3, reward__mean=0.5, **of_sums | {"train__sums__pass_rate": 0.75}),
    )
    assert told(folder, "train/sums/reward/mean") == ["train/sums/reward/mean", "0.5", "0.5", "0.5"]
    assert told(folder, "train/sums/pass_rate") == ["train/sums/pass_rate", "0.25", "0.75", "0.75"]
    assert told(folder, "train/sums/entropy") == ["train/sums/entropy", "1.50", "1.50"]
    assert told(folder, "train/code/reward/mean") == ["train/code/reward/mean", "-1.00", "-1.00", "-1.00"]
    assert "reward/std" not in said(read_run(folder), {})


def test_steps_rewards_and_seconds_are_printed(tmp_path):
    folder = write(
        tmp_path / "run",
        step(1, reward__mean=0.25, throughput__tokens_per_s=900.0),
        step(2, reward__mean=0.75, throughput__tokens_per_s=1100.0, time__rollout_s=8.0),
        step(3, reward__mean=0.5, throughput__tokens_per_s=2200.0, time__rollout_s=10.0),
    )
    text = said(read_run(folder), {"train": 0.255}, 9)
    assert text.startswith(f"{folder}: 3 of 9 steps\n")
    assert told(folder, "reward/mean") == ["reward/mean", "0.25", "0.5", "0.75"]
    assert told(folder, "rollout_s") == ["rollout_s", "8.00", "8.00", "10.00", "80%"]
    assert told(folder, "update_s") == ["update_s", "2.00", "2.00", "2.00", "20%"]
    assert told(folder, "tokens_per_s") == ["tokens_per_s", "1,400", "1,100", "2,200"]
    assert re.search(r"train +26%", text)
    # What takes longest comes first.
    assert text.index("rollout_s") < text.index("update_s")


def test_the_ends_of_all_samples_add_up_by_rollout_and_source(tmp_path):
    names = ("generated", "trained", "unused", "carried_in", "carried_out")

    def line(number: int, part: str, *counts: int) -> dict[str, int]:
        samples = {f"{part}samples/{name}": count for name, count in zip(names, counts, strict=True)}
        return samples | {f"{part}tokens/{name}": 10 * count for name, count in zip(names, counts, strict=True)}

    first = {**line(1, "", 1000, 900, 0, 0, 100), **line(1, "train/a/", 4, 4, 0, 0, 0), "samples/lost": 1000}
    folder = write(
        tmp_path / "run",
        {**step(1), **first, **line(1, "critic/", 8, 0, 8, 0, 0)},
        {**step(2), **line(2, "", 50, 60, 20, 100, 70), **line(2, "train/b/", 1, 1, 0, 0, 0)},
    )
    text = said(read_run(folder), {})
    assert (
        "  samples: 2,050 generated = 960 trained (47%) + 20 unused (1%) + 70 carried (3%) + 1,000 lost (49%)\n" in text
    )
    assert "  tokens of a: 40 generated = 40 trained (100%)\n" in text
    assert "  samples of critic: 8 generated = 8 unused (100%)\n" in text
    account = summary_values(read_run(folder))["account"]
    assert [(each["rollout"], each["source"]) for each in account] == [("", ""), ("", "a"), ("critic", ""), ("", "b")]
    assert account[0]["tokens"] == {
        "generated": 10_500,
        "trained": 9_600,
        "stale": 0,
        "filtered": 0,
        "failed": 0,
        "unused": 200,
        "carried": 700,
        "lost": 0,
    }


def test_the_validation_before_the_first_step_is_no_step(tmp_path):
    before = {"step": 0, "time/step_s": 90.0, "time/val/rollout_s": 80.0, "throughput/tokens_per_s": 1.0}
    folder = write(tmp_path / "run", before, step(1, throughput__tokens_per_s=900.0))
    assert told(folder, "step_s") == ["step_s", "10.00", "10.00", "10.00"]
    assert told(folder, "rollout_s") == ["rollout_s", "6.00", "6.00", "6.00", "60%"]
    assert told(folder, "tokens_per_s") == ["tokens_per_s", "900.00", "900.00", "900.00"]
    assert "val/rollout" not in said(read_run(folder), {})
    assert summary_values(read_run(folder))["seconds"]["step_s"]["max"] == 10.0


def test_validation_sets_and_the_best_checkpoint_are_printed(tmp_path):
    steps = [{**step(number), "val/aime/mean@4": value} for number, value in ((1, 0.25), (2, 0.75), (3, 0.5))]
    folder = write(tmp_path / "run", *steps)
    assert told(folder, "val/aime") == ["val/aime/mean@4", "0.25", "0.5", "0.75"]
    assert "best checkpoint" not in said(read_run(folder), {})
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best").write_text("step_2\n")
    assert f"best checkpoint: step_2; dagrl export {folder} --best -o DIR" in said(read_run(folder), {})


def test_every_policy_and_its_staleness_are_printed(tmp_path):
    others = {"reward/verdict": 0.25, "reward/overlong": -1.0, "verify/response_tokens/mean": 2.0}
    steps = [{**step(number, reward__mean=0.5), **others, "staleness/mean": 0.0} for number in (1, 2)]
    folder = write(tmp_path / "run", *steps)
    assert told(folder, "reward/verdict") == ["reward/verdict", "0.25", "0.25", "0.25"]
    assert told(folder, "verify/response_tokens/mean") == ["verify/response_tokens/mean", "2.00", "2.00"]
    text = said(read_run(folder), {})
    assert "overlong" not in text and "staleness" not in text
    stale = [{**each, "staleness/mean": 0.5 * at, "staleness/max": 2.0 * at} for at, each in enumerate(steps)]
    folder = write(tmp_path / "run", *stale)
    assert told(folder, "staleness/mean") == ["staleness/mean", "0", "0.5"]
    assert told(folder, "staleness/max") == ["staleness/max", "0", "2.00"]


def test_restarts_are_added_up_over_the_lives_of_a_run(tmp_path):
    counts = [0, 1, 1, 2, 0, 1]
    folder = write(tmp_path, *(step(number, run__restarts=count) for number, count in enumerate(counts, start=1)))
    assert "restarts after losses: 3" in said(read_run(folder), {})


def test_surviving_parts_are_not_reported(tmp_path):
    text = said(read_run(write(tmp_path, step(1, run__restarts=0, staleness__masked=0))), {})
    assert "restarts" not in text and "masked" not in text
    assert "samples masked as too old: 5" in said(read_run(write(tmp_path, step(1, staleness__masked=5))), {})


def test_metrics_that_are_null_are_left_out(tmp_path):
    folder = write(tmp_path, step(1, reward__mean=None), step(2, reward__mean=0.5))
    assert told(folder, "reward/mean") == ["reward/mean", "0.5", "0.5", "0.5"]


@pytest.mark.parametrize("torn", ['{"step": 2, "rew', "[1]\n", '{"no": 1}\n', '{"step": 1e999}\n', "\x00\x00"])
def test_a_torn_line_is_skipped_and_reported(tmp_path, torn):
    run = read_run(write(tmp_path, step(1), end=torn))
    assert (run.last_step, run.torn) == (1, 1)
    assert "a line is torn in metrics.jsonl and left out" in said(run, {})


def test_a_run_before_its_first_step_says_so(tmp_path):
    assert "no step has been finished yet" in said(read_run(write(tmp_path, step(0))), {}, 5)


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no run has written there"):
        read_run(tmp_path)
    (tmp_path / "pipeline.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match="has not finished a step"):
        read_run(tmp_path)


def test_spans_come_from_the_timeline_and_a_foreign_one_is_an_error(tmp_path):
    folder = write(tmp_path, step(1))
    timeline = Timeline()
    timeline.start(folder, None)
    worker = WorkerId("actor", 0)
    timeline.extend([Activity("update", "update", 2.0, 3.5, 1, None, "train", worker)])
    timeline.close()
    (span,) = read_run(folder).spans
    assert (span.name, span.start, span.end, span.step, span.worker) == ("update", 2.0, 3.5, 1, worker)
    (folder / "timeline.json").write_text('[\n{"ph": "X", "name": "update"}\n]\n')
    with pytest.raises(ValueError, match=r"timeline\.json is not a run's timeline: an event lacks 'cat'"):
        read_run(folder)
    event = {"ph": "X", "name": "n", "cat": "c", "ts": "soon", "dur": 1, "args": {"step": 1}}
    (folder / "timeline.json").write_text(f"[\n{json.dumps(event)}\n]\n")
    with pytest.raises(ValueError, match="an event has an unexpected value"):
        read_run(folder)


def test_a_validation_of_the_start_weights_is_printed(tmp_path):
    text = said(read_run(write(tmp_path / "run", {"step": 0, "val/reward/mean": 0.25, "policy_version": 0})), {})
    assert "val/reward/mean  0.25" in text
    assert "policy_version" not in text


def test_cut_responses_are_reported_with_the_key_to_raise(tmp_path):
    folder = write(tmp_path / "run", *(step(number, response_tokens__cut_fraction=0.75) for number in (1, 2)))
    (folder / "pipeline.yaml").write_text("nodes: {act: {op: rollout, sampling: {max_new_tokens: 64}}}\n")
    text = said(read_run(folder), {})
    assert text.count("cut at the token limit") == 1
    assert "75% of the responses were cut at the token limit; raise nodes.act.sampling.max_new_tokens (64)" in text
    (folder / "pipeline.yaml").write_text("{")
    assert "raise nodes.rollout.sampling.max_new_tokens" in said(read_run(folder), {})
