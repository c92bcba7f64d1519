"""What `dagrl plan` says: tables for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagrl.backends.planning.memory import GIB, KINDS
from dagrl.planner.showing.report import Report, report
from dagrl.planner.showing.show import ReportSection, as_text, as_values, memory_sections, problems_in_words

TEMPLATES = Path(__file__).parents[3] / "dag_templates"
EIGHT_B, MIXTURE, TINY = (
    TEMPLATES / f"{name}.yaml" for name in ("qwen3_8b_megatron", "qwen3_30b_a3b_8gpu", "tiny_grpo")
)


def said(found: Report) -> str:
    return as_text(found, memory_sections(found))


def cells(text: str, row: str) -> list[str]:
    """What stands behind the name of a row, of the first that has it."""
    line = next(line.strip() for line in text.splitlines() if line.strip().startswith(row))
    return line.removeprefix(row).split()


def test_a_table_has_each_engine_and_each_kind_of_memory() -> None:
    found = report(EIGHT_B, [])
    text = said(found)
    assert text.startswith(
        f"{EIGHT_B}: qwen3-8b-megatron, 8.19 billion parameters\n\ngroup gpu: 8 x H100 of 79.1 GiB, "
    )
    assert "actor + reference" in text and "tp 2 + sp, pp 4, dp 1" in text and "4 servers of 2 GPUs" in text
    actor, generator = found.fit.groups[0].tenants
    for kind in KINDS:
        sizes = [tenant.memory.awake.get(kind, 0) for tenant in (actor, generator)]
        if any(sizes):
            assert cells(text, f"{kind} ") == [f"{size / 2**30:.1f}" if size else "-" for size in sizes]
        else:
            assert f"\n  {kind} " not in text
    assert cells(text, "awake") == [f"{tenant.memory.peak / 2**30:.1f}" for tenant in (actor, generator)]
    assert "stays awake" not in text and problems_in_words(found) == []
    # The fullest moment comes first, and how full it is.
    assert text.index("generator: rollout  ") < text.index("actor: update, stage 1 of 4  ")
    assert f"host memory: {8 * actor.memory.host / 2**30:.1f} GiB of each machine" in text


def test_engines_that_do_not_fit_are_marked_with_a_remedy() -> None:
    found = report(EIGHT_B, [], gpu="A100-40GB")
    text = said(found)
    over = [line.split()[:2] for line in text.splitlines() if line.endswith("|  over")]
    assert over == [["actor:", "update,"], ["generator:", "rollout"]]
    problem, remedy = problems_in_words(found)
    assert problem == f"dagrl plan: group {found.fit.problems[0].group}: {found.fit.problems[0].text}"
    assert remedy.startswith(
        "dagrl plan: it fits with engines.actor.keep_communicators=false engines.actor.transformer."
    )
    again = report(EIGHT_B, remedy.partition("it fits with ")[2].split(), gpu="A100-40GB")
    assert again.fits


def test_an_engine_that_never_sleeps_stays_awake() -> None:
    text = said(report(MIXTURE, [], gpu="H200"))
    assert "30.53 billion parameters, 3.35 billion of them for each token" in text
    assert cells(text, "asleep")[:2] == ["stays", "awake"]


def test_an_engine_that_stays_while_others_sleep_is_shown_at_rest() -> None:
    found = report(EIGHT_B, ["engines.actor.sleep=false"], gpu="H200")
    (group,) = found.fit.groups
    assert cells(said(found), "at rest") == [f"{group.at_rest['actor'] / GIB:.1f}", "-"]


def test_small_models_on_cpu_slots_are_shown_in_mib() -> None:
    text = said(report(TINY, []))
    assert "group train: 1 x CPU slot, 1 machine" in text and "MiB on the fullest slot" in text
    assert "asleep" not in text and "taken" not in text


def test_a_missing_remedy_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagrl.planner.showing.report.nearest_change", lambda *args, **options: None)
    *_, last = problems_in_words(report(EIGHT_B, [], gpu="L4"))
    assert last == "dagrl plan: no change that was tried makes it fit; use more or larger GPUs"


def test_json_has_the_same_in_bytes() -> None:
    found = report(EIGHT_B, [], gpu="A100-40GB")
    told = as_values(found, memory_sections(found))
    assert list(told) == ["pipeline", "fits", "model", "problems", "change", "groups"]
    assert told["fits"] is False and told["model"]["parameters"] == found.fit.shape.parameters
    (problem,) = told["problems"]
    assert problem["engine"] == "actor" and problem["over_bytes"] == found.fit.problems[0].over
    assert told["change"] == found.change.overrides() if found.change else False
    (group,) = told["groups"]
    assert (group["name"], group["gpu"], group["nodes"], group["slots_per_node"]) == ("gpu", "A100-40GB", 1, 8)
    actor, generator = group["engines"]
    assert actor["engines"] == ["actor", "reference"] and actor["sleeps"] is True
    assert list(actor["awake_bytes"]) == list(KINDS)
    assert sum(generator["awake_bytes"].values()) == generator["peak_bytes"]
    for moment in group["moments"]:
        assert sum(moment["bytes"].values()) == moment["total_bytes"]


def test_others_add_sections() -> None:
    found = report(TINY, [])
    sections = [*memory_sections(found), ReportSection(["a step takes 3 s"], "seconds", {"step": 3.0})]
    assert as_text(found, sections).endswith("\n\na step takes 3 s\n")
    told = as_values(found, sections)
    assert told["seconds"] == [{"step": 3.0}] and len(told["groups"]) == 2


def test_neither_data_nor_weights_need_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    shape |= {"intermediate_size": 3072}
    (folder / "config.json").write_text(json.dumps(shape | {"num_key_value_heads": 8, "vocab_size": 32000}))
    paths = [f"model={{path: {folder}, init: null, tokenizer: null}}", "data.train=nowhere.parquet"]
    assert report(EIGHT_B, paths).fit.shape.vocabulary == 32000
