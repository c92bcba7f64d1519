"""`dagrl why`: where the time went, and advice that holds when it is followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finished_runs import sample, write_run, write_samples

from dagrl.cli import main
from dagrl.planner.simulation.costs import CostTable
from dagrl.reporting.why.critical_path import STRAGGLER, Part
from dagrl.reporting.why.explain import Explanation, as_text, explain, straggler
from dagrl.scheduler.intervals import Activity
from dagrl.scheduler.plan import WorkerId
from dagrl.tracking.timeline import Timeline

SECONDS = CostTable({"rollout": 2.0, "reward": 3.0, "ref": 0.5, "update": 2.0}, sync=1.0, save=8.0)
STEPS = 8


def run_of(folder: Path, *overrides: str, costs: CostTable = SECONDS) -> Path:
    return write_run(folder, "run.save_every=null", "run.validate_every=null", *overrides, steps=STEPS, costs=costs)


def gain(explained: Explanation, key: str) -> float:
    return next(each.gain for each in explained.advice if each.key == key)


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    return explain(run_of(tmp_path_factory.mktemp("runs") / "base"))


def test_the_path_is_the_step_by_node_and_cause(explained: Explanation) -> None:
    # The first shard is sampled in 2 s; the host's one process then has rewards for 2 x 3 s; the update, 2 x 2 s; sync.
    assert explained.step_s == pytest.approx(2 + 6 + 4 + 1)
    assert sum(seconds for *_, seconds in explained.path) == pytest.approx(explained.step_s)
    found = {(name, cause): seconds for name, _, cause, seconds in explained.path}
    assert found["reward", "host"] == pytest.approx(6) and found["update", "computation"] == pytest.approx(4)
    assert found["rollout", "generation"] == pytest.approx(2) and found["sync", "weights travel"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("key", "overrides", "costs"),
    [
        ("run.host_workers=2", ["run.host_workers=2"], SECONDS),
        ("schedule.max_staleness=1", ["schedule.max_staleness=1"], SECONDS),
        ("nodes.reward", [], CostTable({**SECONDS.shard, "reward": 1.5}, sync=1.0, save=8.0)),
    ],
)
def test_a_run_that_follows_the_advice_gains_the_predicted_time(
    explained: Explanation, tmp_path: Path, key: str, overrides: list[str], costs: CostTable
) -> None:
    after = explain(run_of(tmp_path / "after", *overrides, costs=costs))
    saved = 1 - after.usual_step_s / explained.usual_step_s
    assert saved > 0.05
    assert gain(explained, key) == pytest.approx(saved, rel=0.25)


def test_a_straggler_is_named_and_over_sampling_advised(tmp_path: Path) -> None:
    """Shards end after 1, 2 and 3 seconds, and the last one after 10; the update takes 2."""
    folder = run_of(tmp_path / "run", "schedule.shards_per_step=4")
    timeline = Timeline()
    timeline.start(folder, None)
    for step in range(1, STEPS + 1):
        bars = [("rollout", "rollout", "generator", 0, end, shard) for shard, end in enumerate((1, 2, 3, 10))]
        for name, group, on, start, end, shard in [*bars, ("update", "train", "actor", 10, 12, None)]:
            times = step * 12.0 + start, step * 12.0 + end
            timeline.extend([Activity(name, name, *times, step, shard, group, WorkerId(on, 0))])
    timeline.close()
    lengths = {"response_tokens/max": 16384, "response_tokens/mean": 2000.0}
    lines = [json.dumps({"step": step, **lengths}) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step in range(1, STEPS + 1):
        write_samples(folder, step, [sample(4), sample(5, response_tokens=[3] * 16384), sample(6)])
    explained = explain(folder)
    causes = {cause: seconds for _, _, cause, seconds in explained.path}
    assert causes["waits for the last responses"] == pytest.approx(7.0)
    assert ": the longest response has 16,384 tokens (sample 5), the mean one 2,000\n" in as_text(folder, explained)
    # Without its tail, a rollout of 10 s takes 3 to 3.75 s, as there are more prompts.
    (found,) = [each for each in explained.advice if each.key == "nodes.rollout.over_sampling_batch_size=40"]
    assert found.step_s == pytest.approx(12 - (10 - 3 * 1.125))


def test_output_is_text_or_json(tmp_path: Path, capsys) -> None:
    folder = run_of(tmp_path / "run")
    assert main(["why", str(folder), "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert "step 3: 13.0 s" in out and "run.host_workers=2" in out
    assert main(["why", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"][0]["node"] == "reward"
    assert main(["why", str(folder), "--step", "99"]) == 2
    assert "has no timeline of step 99: steps 1 to 8 are known" in capsys.readouterr().err


def test_a_run_that_has_just_begun_has_its_first_step_explained(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run", steps=1, costs=SECONDS)
    assert main(["why", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "step 1: " in out and "the first step of a run takes longer" in out
    assert "advice needs two steps beside the first" in out
    (folder / "metrics.jsonl").unlink()
    (folder / "timeline.json").unlink()
    assert main(["why", str(folder)]) == 2
    assert "has not finished a step" in capsys.readouterr().err


def test_responses_of_one_length_are_not_blamed(tmp_path: Path) -> None:
    parts = [Part("rollout", "generator", STRAGGLER, 1.0, 3.0)]
    found = straggler(tmp_path, {4: parts, 5: []}, {4: {"response_tokens/max": 100.0, "response_tokens/mean": 98.0}})
    assert found is not None and found.step == 4 and found.seconds == 2.0
    assert "a tool, an environment or a server is late" in found.sentence()
    assert straggler(tmp_path, {5: []}, {}) is None


def test_engines_that_take_turns_on_roomy_gpus_stay_awake(tmp_path: Path) -> None:
    """The advice needs the memory of the GPUs, which `workers.json` names."""
    groups = ["groups.train={gpus_per_node: 1}", "groups.rollout=null", "engines.generator.group=train"]
    server = ["engines.generator.backend=sglang", "engines.generator.server={max_total_tokens: 4096}"]
    costs = CostTable(SECONDS.shard, sync=1.0, save=8.0, sleep=1.0, wake=0.5)
    folder = run_of(tmp_path / "run", *groups, *server, "engines.generator.max_batch_size=null", costs=costs)
    key = "engines.actor.sleep=false engines.generator.sleep=false"
    assert key not in [each.key for each in explain(folder).advice]
    gpus = {f"{engine}/0": {"gpu": "NVIDIA H100 80GB HBM3"} for engine in ("actor", "generator")}
    (folder / "workers.json").write_text(json.dumps(gpus))
    # Both sleep and wake once a step, but the generator sleeps while the trainer wakes.
    explained = explain(folder)
    assert 2.0 < gain(explained, key) * explained.usual_step_s <= 3.0


@pytest.mark.parametrize(
    ("overrides", "advised"),
    [([], True), (["nodes.rollout.n=1"], False), (["data.max_prompt_tokens=16"], False)],
)
def test_long_prompts_of_several_responses_are_shared(tmp_path: Path, overrides: list[str], advised: bool) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "num_attention_heads": 16}
    sizes |= {"head_dim": 128, "max_position_embeddings": 8192}
    model = [f"model.init.{name}={size}" for name, size in sizes.items()]
    nodes = [f"nodes.{name}.tokens_per_micro_batch=16384" for name in ("ref", "update")]
    rows = ["data.max_prompt_tokens=4096", "nodes.rollout.n=8", "nodes.rollout.sampling.max_new_tokens=512"]
    costs = CostTable({"rollout": 2.0, "reward": 0.1, "ref": 3.0, "update": 6.0}, sync=0.1, save=8.0)
    gpus = ["groups.train={gpus_per_node: 1, gpu: H100}", "groups.rollout={gpus_per_node: 1, gpu: H100}"]
    server = ["engines.generator.backend=sglang", "engines.generator.max_batch_size=null"]
    folder = run_of(tmp_path / "run", *gpus, *server, *model, *nodes, *rows, *overrides, costs=costs)
    found = {each.key: each for each in explain(folder).advice}
    if not advised:
        assert "engines.actor.prefix_sharing=true" not in found
        return
    # 2048 + 8 x 256 tokens instead of 8 x 2304, in all but attention.
    advice = found["engines.actor.prefix_sharing=true"]
    assert 0.5 < advice.gain < 0.75 and 0.3 < advice.least < advice.gain < advice.most


def test_steps_whose_responses_were_cut_say_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=STEPS, costs=SECONDS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    cut = [json.dumps(line | {"response_tokens/cut_fraction": 1.0}) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(cut))
    explained = explain(folder)
    assert explained.notes.startswith(
        "100% of the responses were cut at the token limit; raise nodes.rollout.sampling."
    )
    assert as_text(folder, explained).count(explained.notes) == 1
