"""Settings of single sources of prompts: their effect, and their bounds."""

from __future__ import annotations

import pytest

from dagrl.config.schema import Pipeline
from dagrl.validation import check_file

HOT = "sampling: {max_new_tokens: 12, temperature: 0.5}"


def sources(more: str) -> tuple[str, str]:
    return "train: train.parquet", f"train: {{sums: train.parquet, more: {{path: train.parquet, {more}}}}}"


@pytest.mark.parametrize(
    ("path", "unused"),
    [("train.parquet", True), ("'*.parquet'", True), ("[train.parquet, files]", False), ("files", False)],
)
def test_a_split_of_no_folder_is_a_warning(project, row, path, unused) -> None:
    (project.folder / "files").mkdir()
    project.write_rows("files/test.parquet", [row])
    found = project.warnings(("train: train.parquet", f"train: {{path: {path}, split: test}}"))
    assert found == ([("data.train.split", "unused-split")] if unused else [])


def pipeline_of(project, *edits: tuple[str, str]) -> Pipeline:
    return check_file(project.pipeline(*edits)).loaded.pipeline


def test_sources_have_their_own_numbers_of_responses_and_sampling(project) -> None:
    checked = check_file(project.pipeline(sources(f"n: 6, {HOT}, max_prompt_tokens: 5")))
    pipeline = checked.loaded.pipeline
    assert pipeline.group_sizes() == {"sums": 4, "more": 6}
    assert pipeline.rows_per_prompt() == 6
    assert pipeline.longest_row == 16 + 12
    assert [*pipeline.own_samplings("rollout")] == ["more"]
    readers = {name for name, node in checked.graph.nodes.items() if "data_set" in node.inputs}
    assert readers == {"rollout", "ref", "advantage", "update", "samples"}


def test_one_source_may_have_them_too(project) -> None:
    only = ("train: train.parquet", f"train: {{path: train.parquet, n: 2, {HOT}}}")
    pipeline = pipeline_of(project, only)
    assert pipeline.group_sizes() == {"train": 2}
    assert [*pipeline.own_samplings("rollout")] == ["train"]
    path = project.pipeline((only[0], only[1].replace("0.5", "0") + " #!"))
    project.assert_problem(path, "data.train.sampling.temperature", "greedy-samples")


GROUP = "n: 4, sampling"
MIX = ("reward: {op: reward, fn: exact}", "reward: {op: reward, fn: exact}\n  mix: {op: mix, per_prompt: 3} #!")
KEEP = ("reward: {op: reward, fn: exact}", "reward: {op: reward, fn: exact}\n  keep: {op: filter} #!")
BUFFER = ("estimator: grpo", "estimator: grpo, overlong_buffer: {len: 3, penalty_factor: 1}")
TOO_SMALL = "tokens_per_micro_batch: 27"


@pytest.mark.parametrize(
    ("more", "place", "code", "edits"),
    [
        ("n: 1", "data.train.more.n", "group-too-small", ()),
        ("n: 0", "data.train.more.n", "invalid-value", ()),
        ("sampling: {max_new_tokens: 8, temperature: 0}", "data.train.more.sampling.temperature", "greedy-samples", ()),
        ("sampling: {temperature: 1}", "data.train.more.sampling.max_new_tokens", "missing-key", ()),
        ("sampling: {max_new_tokens: 8, top_k: 0}", "data.train.more.sampling.top_k", "invalid-value", ()),
        ("max_prompt_tokens: 17", "data.train.more.max_prompt_tokens", "prompt-too-long", ()),
        ("max_new_tokens: 4", "data.train.more.max_new_tokens", "unknown-key", ()),
    ],
)
def test_settings_that_are_wrong(project, more, place, code, edits) -> None:
    old, new = sources(more)
    problem = project.only_problem(project.pipeline((old, f"{new} #!"), *edits))
    assert (problem.place, problem.code) == (place, code)


@pytest.mark.parametrize(
    ("more", "edit", "place", "code"),
    [
        ("n: 1, weight: 1", KEEP, "nodes.keep", "group-too-small"),
        ("sampling: {max_new_tokens: 2}", BUFFER, "nodes.advantage.overlong_buffer.len", "buffer-too-long"),
        (HOT, ("fn: exact}", "fn: exact}"), None, None),
        (
            "sampling: {max_new_tokens: 12}",
            ("loss: {kl_coef: 0.01}", f"{TOO_SMALL}, loss: {{kl_coef: 0.01}}"),
            "nodes.update.tokens_per_micro_batch",
            "micro-batch-too-small",
        ),
    ],
)
def test_rules_of_nodes_hold_for_each_source(project, more, edit, place, code) -> None:
    path = project.pipeline(sources(more), edit)
    if place is None:
        check_file(path)
    else:
        assert (place, code) in [(problem.place, problem.code) for problem in project.problems(path)]


def test_an_estimator_that_compares_needs_no_n_of_a_rollout_whose_sources_all_have_theirs(project) -> None:
    all_own = sources("n: 4")[1].replace("sums: train.parquet", "sums: {path: train.parquet, n: 2}")
    check_file(project.pipeline(("train: train.parquet", all_own), ("n: 4, sampling", "n: 1, sampling")))


def test_sampling_without_a_rollout_has_no_effect(project) -> None:
    sft = "learn: {op: sft, engine: actor}"
    text = project.pipeline(sources("n: 2")).read_text()
    start = text.index("nodes:")
    nodes = text[start : text.index("run:")]
    text = text.replace(nodes, f"nodes:\n  {sft}\n").replace(
        "  prompts_per_step: 8", "  prompts_per_step: 8\n  responses: [prompt]\n  max_response_tokens: 8"
    )
    text = text.replace("  reference: {backend: megatron, frozen_copy_of: actor}\n", "")
    text = text.replace("  generator: {backend: hf, group: rollout, weights_from: actor}\n", "").replace(
        "  rollout: {cpus_per_node: 1}\n", ""
    )
    problem = project.only_problem(project.write("p.yaml", text))
    assert problem.place == "data.train.more.n"


REWARD = "reward: {op: reward, fn: exact}"
PLAIN = sources("weight: 1")


def rewarded(by_source: str) -> tuple[str, str]:
    return REWARD, f"reward: {{op: reward, fn: exact, by_source: {{{by_source}}}}} #!"


def test_nodes_have_functions_and_bounds_by_source(project) -> None:
    keep = "keep: {op: filter, by_source: {more: {lower: 0.1, upper: 0.9}}}"
    own = f"reward: {{op: reward, by_source: {{sums: {{fn: exact}}, more: {{fn: math}}}}}}\n  {keep}"
    graph = check_file(project.pipeline(PLAIN, (REWARD, own))).graph
    assert {"data_set", "answer"} <= graph.nodes["reward"].inputs.keys()
    assert "data_set" in graph.nodes["keep"].inputs


@pytest.mark.parametrize(
    ("edit", "place", "code", "named"),
    [
        (rewarded("mor: {fn: math}"), "nodes.reward.by_source.mor", "unknown-source", "more"),
        (rewarded("val: {fn: math}"), "nodes.reward.by_source.val", "unknown-source", "sums"),
        (rewarded("more: {fn: mth}"), "nodes.reward.by_source.more.fn", "unknown-reward", "math"),
        (rewarded("more: {args: {}}"), "nodes.reward.by_source.more.fn", "missing-key", "fn"),
        (rewarded("more: {fn: math, args: {x: 1}}"), "nodes.reward.by_source.more.args", "invalid-reward", "x"),
        (
            (REWARD, "reward: {op: reward, by_source: {more: {fn: math}}} #!"),
            "nodes.reward.by_source",
            "source-without-reward",
            "sums",
        ),
        ((REWARD, "reward: {op: reward} #!"), "nodes.reward", "fn", "fn"),
        (
            (REWARD, "reward: {op: reward, args: {a: 1}, by_source: {sums: {fn: exact}, more: {fn: math}}} #!"),
            "nodes.reward.args",
            "option-without-effect",
            "by_source",
        ),
        (
            (REWARD, f"{REWARD}\n  keep: {{op: filter, fn: 'rules:rule', by_source: {{more: {{lower: 0}}}}}} #!"),
            "nodes.keep.by_source",
            "option-without-effect",
            "fn",
        ),
        (
            (REWARD, f"{REWARD}\n  keep: {{op: filter, by_source: {{mroe: {{lower: 0}}}}}} #!"),
            "nodes.keep.by_source.mroe",
            "unknown-source",
            "more",
        ),
        (
            (REWARD, f"{REWARD}\n  keep: {{op: filter, upper: 0.5, by_source: {{more: {{lower: 0.6}}}}}} #!"),
            "nodes.keep.by_source.more.lower",
            "crossed-bounds",
            "0.6",
        ),
        (
            (REWARD, f"{REWARD}\n  keep: {{op: filter, by_source: {{more: {{metric: reward}}}}}} #!"),
            "nodes.keep.by_source.more.metric",
            "unknown-key",
            "metric",
        ),
    ],
)
def test_sections_by_source_that_are_wrong(project, edit, place, code, named) -> None:
    project.write("rules.py", "def rule(reward):\n    return True\n")
    project.assert_problem(project.pipeline(PLAIN, edit), place, code, named)


def test_a_reward_by_source_may_name_validation_sets(project) -> None:
    val = (PLAIN[0], PLAIN[1] + "\n  val: {aime: train.parquet}")
    run = ("run: {steps: 10}", "run: {steps: 10, validate_every: 5}")
    check_file(project.pipeline(val, run, rewarded("aime: {fn: math}")))
    own = (REWARD, "reward: {op: reward, by_source: {sums: {fn: exact}, more: {fn: math}}} #!")
    project.assert_problem(project.pipeline(val, run, own), "nodes.reward.by_source", "source-without-reward", "aime")


def test_only_sources_whose_reward_reads_answers_need_them(project) -> None:
    row = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": None, "style": "rule"}}
    project.write_rows("none.parquet", [row, row | {"reward_model": {"ground_truth": "2", "style": "rule"}}])
    project.write("lengths.py", "def short(response):\n    return -float(len(response))\n")
    two = ("train: train.parquet", "train: {sums: train.parquet, more: none.parquet} #!")
    problem = project.only_problem(project.pipeline(two))
    assert problem.place == "data.train.more"
    check_file(project.pipeline(two, (REWARD, REWARD[:-1] + ", by_source: {more: {fn: 'lengths:short'}}}")))
    other = REWARD[:-1] + ", by_source: {sums: {fn: 'lengths:short'}}}"
    assert project.only_problem(project.pipeline(two, (REWARD, other))).place == "data.train.more"
