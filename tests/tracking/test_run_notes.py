"""What is said about responses that were cut."""

from __future__ import annotations

import pytest

from dagrl.tracking.run_notes import run_notes

SAMPLING = {"max_new_tokens": 8}
CUT = [{"response_tokens/cut_fraction": 0.4}, {"response_tokens/cut_fraction": 0.8}, {"reward/mean": 1.0}]
VAL = [{"val/response_tokens/cut_fraction": 0.5}]


@pytest.mark.parametrize(
    ("steps", "node", "ends"),
    [
        (
            CUT,
            {"sampling": SAMPLING},
            ["60% of the responses were cut at the token limit; raise {}.sampling.max_new_tokens (8)"],
        ),
        (
            VAL,
            {"sampling": SAMPLING, "val_sampling": {"max_new_tokens": 16}},
            [
                "50% of the responses in validation were cut at the token limit; raise "
                "{}.val_sampling.max_new_tokens (16)"
            ],
        ),
        (
            CUT,
            {"sampling": SAMPLING, "max_turn_tokens": 4},
            [
                "60% of the responses were cut at the token limit; raise {}.sampling.max_new_tokens (8) or "
                "{}.max_turn_tokens (4)"
            ],
        ),
        ([{"response_tokens/cut_fraction": 0.4}], {"sampling": SAMPLING}, []),
        ([{"response_tokens/cut_fraction": float("nan")}], {"sampling": SAMPLING}, []),
        ([], {"sampling": SAMPLING}, []),
    ],
)
def test_the_key_of_the_limit_is_named(steps, node, ends) -> None:
    config = {"nodes": {"judge": {"op": "judge"}, "act": {"op": "rollout", **node}}}
    assert list(run_notes(steps, config).values()) == [end.replace("{}", "nodes.act") for end in ends]


@pytest.mark.parametrize(
    ("train", "ends"),
    [
        ("a.parquet", ["nodes.r.sampling.max_new_tokens (8)"]),
        ({"path": "a.parquet", "prompt_key": "q"}, ["nodes.r.sampling.max_new_tokens (8)"]),
        ({"path": "a.parquet", "sampling": {"max_new_tokens": 5}}, ["data.train.sampling.max_new_tokens (5)"]),
        ({"a": {"path": "a.parquet", "sampling": {"max_new_tokens": 5}}}, ["data.train.a.sampling.max_new_tokens (5)"]),
        ({"a": "a.parquet", "b": {"path": "b.parquet", "n": 2}}, ["nodes.r.sampling.max_new_tokens (8)"]),
        (
            {"a": "a.parquet", "b": {"path": "b.parquet", "sampling": {"max_new_tokens": 5}}},
            ["`a` were cut at the token limit; raise nodes.r.sampling.max_new_tokens (8)"],
        ),
        (
            {"b": "a.parquet", "a": {"path": "b.parquet", "sampling": {"max_new_tokens": 5}}},
            ["`a` were cut at the token limit; raise data.train.a.sampling.max_new_tokens (5)"],
        ),
    ],
)
def test_the_key_is_that_of_the_source_that_was_cut(train, ends) -> None:
    config = {"data": {"train": train}, "nodes": {"r": {"op": "rollout", "sampling": SAMPLING}}}
    of_a = {"train/a/response_tokens/cut_fraction": 0.9, "train/b/response_tokens/cut_fraction": 0.1}
    notes = run_notes([{"response_tokens/cut_fraction": 0.6} | of_a], config)
    assert len(notes) == len(ends)
    assert all(note.endswith(end) for note, end in zip(notes.values(), ends, strict=True)), notes


def test_a_pipeline_that_is_not_there_has_the_usual_key() -> None:
    (note,) = run_notes(CUT, {}).values()
    assert note.endswith("raise nodes.rollout.sampling.max_new_tokens")
