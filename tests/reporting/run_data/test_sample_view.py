"""Samples as the page shows them: what tells their prompts apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from finished_runs import sample, write_samples

from dagrl.reporting.run_data.sample_view import sample_view

SYSTEM = "You are a careful assistant. " * 5
TEMPLATES = {
    "chatml": "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n",
    "llama 3": "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<bos><start_of_turn>user\n{system}\n\n{user}<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] {system}\n\n{user} [/INST]",
    "gpt-oss": "<|start|>system<|message|>{system}<|end|><|start|>user<|message|>{user}<|end|><|start|>assistant",
    "deepseek": "<｜begin▁of▁sentence｜>{system}<｜User｜>{user}<｜Assistant｜><think>\n",
    "phi": "<|system|>\n{system}<|end|>\n<|user|>\n{user}<|end|>\n<|assistant|>\n",
    "none": "{system}\nQuestion: {user}\nAnswer:",
}


def asked(folder: Path, prompts: list[str]) -> list[str]:
    write_samples(folder, 1, [sample(number, prompt=prompt) for number, prompt in enumerate(prompts)])
    return [row["asked"] for row in sample_view(folder, 1, validation=False)]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_prompts_are_shown_without_their_common_beginning(tmp_path: Path, template: str) -> None:
    questions = ["How many eggs has Janet?", "How many hens has James?", "How much is 12?"]
    found = asked(tmp_path, [template.format(system=SYSTEM, user=question) for question in questions])
    for text, word in zip(found, ["many eggs", "many hens", "much is"], strict=True):
        assert text.startswith(f"…{word}"), text


def test_the_last_of_several_turns_is_shown(tmp_path: Path) -> None:
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    history = turn.format("Hello") + "Hi<|im_end|>\n"
    assert asked(tmp_path, [history + turn.format("Add 1"), turn.format("Sort")]) == ["Add 1", "Sort"]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        # Responses to one prompt, and prompts without a common word.
        (["3+4=", "3+4="], ["3+4=", "3+4="]),
        (["3+4=", "3+5="], ["3+4=", "3+5="]),
        (["", "a"], ["", "a"]),
        (["one", "one two"], ["one", "one two"]),
        # A message with images, and one that is empty.
        (
            ["<|im_start|>user\n<|vision_start|>x<|vision_end|>What?<|im_end|>"],
            ["<|vision_start|>x<|vision_end|>What?"],
        ),
        (["<|im_start|>user\n<|im_end|>"], ["<|im_start|>user\n<|im_end|>"]),
    ],
)
def test_short_and_empty_prompts_are_whole(tmp_path: Path, prompts: list[str], expected: list[str]) -> None:
    assert asked(tmp_path, prompts) == expected


def test_a_long_message_is_cut(tmp_path: Path) -> None:
    (text,) = asked(tmp_path, ["word " * 1000])
    assert len(text) < 250
