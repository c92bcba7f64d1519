"""What may not be said of responses of the data set, and of the nodes that learn from them."""

from __future__ import annotations

import pytest

from dagrl.validation import check_file

NODES = """\
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
  ref: {op: logprob, engine: reference, write: ref_logprob}
  advantage: {op: advantage, estimator: grpo}
  update: {op: update, engine: actor, loss: {kl_coef: 0.01}}
"""
REF = "  ref: {op: logprob, engine: reference, read: {response_tokens: demonstration}, write: ref_logprob}\n"
SFT = "  sft: {op: sft, engine: actor}\n"
DPO = REF + "  dpo: {op: dpo, engine: actor}\n"
SAMPLED = """\
  rollout: {op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}
  reward: {op: reward, fn: exact}
"""
MIX = NODES.replace("kl_coef: 0.01", "kl_coef: 0.01, sft_coef: 0.1") + "  mix: {op: mix}\n"
NO_GENERATOR = (
    ("  generator: {backend: hf, group: rollout, weights_from: actor}\n", ""),
    ("  rollout: {cpus_per_node: 1}\n", ""),
)
ONE, TWO = "  responses: [chosen]\n", "  responses: [chosen, rejected]\n"
LONGEST = "  max_response_tokens: 6\n"


def lines(nodes: str, data: str, *edits: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Edits of the pipeline: its nodes, what is added under ``data``, and others, in what they make of the file."""
    for old, new in edits:
        assert (nodes + data).count(old) == 1, old
        nodes, data = nodes.replace(old, new), data.replace(old, new)
    return ((NODES, nodes), ("  max_prompt_tokens: 16\n", "  max_prompt_tokens: 16\n" + data))


CASES = {
    "no longest": (
        (*lines(SFT, ONE, ("[chosen]", "[chosen] #!")), *NO_GENERATOR),
        "data.responses",
        "missing-max-response-tokens",
    ),
    "longest of nothing": (
        lines(NODES, LONGEST, (": 6\n", ": 6 #!\n")),
        "data.max_response_tokens",
        "option-without-effect",
    ),
    "what is too long of nothing": (
        lines(NODES, "  overlong_responses: cut #!\n"),
        "data.overlong_responses",
        "option-without-effect",
    ),
    "a single response": (
        (*lines(DPO, ONE + LONGEST, ("[chosen]", "[chosen] #!")), *NO_GENERATOR),
        "data.responses",
        "not-a-pair",
    ),
    "smoothing of another loss": (
        (
            *lines(DPO, TWO + LONGEST, ("engine: actor}", "engine: actor, loss: ipo, label_smoothing: 0.1} #!")),
            *NO_GENERATOR,
        ),
        "nodes.dpo.label_smoothing",
        "option-without-effect",
    ),
    "a pair is too long for a micro-batch": (
        (
            *lines(DPO, TWO + LONGEST, ("engine: actor}", "engine: actor, tokens_per_micro_batch: 43} #!")),
            *NO_GENERATOR,
        ),
        "nodes.dpo.tokens_per_micro_batch",
        "micro-batch-too-small",
    ),
    "log-probs of demonstrations are too long": (
        (*lines(DPO, TWO + LONGEST, ("ref_logprob}", "ref_logprob, tokens_per_micro_batch: 21} #!")), *NO_GENERATOR),
        "nodes.ref.tokens_per_micro_batch",
        "micro-batch-too-small",
    ),
    "one response to compare in validation": (
        (
            *lines(
                DPO + SAMPLED,
                TWO + LONGEST + "  val: train.parquet\n",
                ("max_new_tokens: 8}}", "max_new_tokens: 8}} #!"),
            ),
            ("run: {steps: 10}", "run: {steps: 10, validate_every: 5}"),
        ),
        "nodes.rollout",
        "not-a-pair",
    ),
    "nothing to tell": (
        (
            *lines(SFT, ONE + LONGEST + "  val: train.parquet\n", ("actor}", "actor, val_loss: false}")),
            ("run: {steps: 10}", "run: {steps: 10, validate_every: 5} #!"),
            *NO_GENERATOR,
        ),
        "run.validate_every",
        "empty-validation",
    ),
    "response column that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[choosen]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "wrong-columns",
    ),
    "response field that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[extra_info.anser]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "wrong-columns",
    ),
    "response field of a struct that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[extra.answer]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "wrong-columns",
    ),
    "responses that are numbers": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[number]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "wrong-columns",
    ),
    "no demonstrations": (
        (
            *lines(NODES + "  sft: {op: sft, engine: other} #!\n", ""),
            ("  reference:", "  other: {backend: megatron, group: train, optimizer: {lr: 1e-3}}\n  reference:"),
        ),
        "nodes.sft",
        "missing-column",
    ),
    "log-probs of responses that nobody samples": (
        (
            *lines(DPO, TWO + LONGEST, (REF, "  ref: {op: logprob, engine: reference, write: ref_logprob} #!\n")),
            *NO_GENERATOR,
        ),
        "nodes.ref",
        "missing-column",
    ),
    "trained twice": (
        lines(NODES + "  sft: {op: sft, engine: actor} #!\n", ONE + LONGEST),
        "nodes.sft.engine",
        "trained-twice",
    ),
    "no expert to learn from": (
        lines(NODES, "", ("kl_coef: 0.01}}", "kl_coef: 0.01, sft_coef: 0.1}} #!")),
        "nodes.update",
        "missing-column",
    ),
    "experts of nothing": (
        lines(f"{SFT}{SAMPLED}  mix: {{op: mix}} #!\n", ONE + LONGEST),
        "nodes.mix",
        "mix-without-rollout",
    ),
    "experts without a rollout": (
        (*lines(DPO + "  mix: {op: mix} #!\n", TWO + LONGEST), *NO_GENERATOR),
        "nodes.mix",
        "mix-without-rollout",
    ),
    "experts that take nobody's place": (
        lines(MIX, ONE + LONGEST, ("n: 4,", "n: 4, write: {response_tokens: mine},"), ("op: mix}", "op: mix} #!")),
        "nodes.mix",
        "missing-column",
    ),
    "too many experts": (
        lines(MIX, ONE + LONGEST, ("op: mix}", "op: mix, per_prompt: 3} #!"), ("[chosen]", "[chosen, rejected, said]")),
        "nodes.mix.per_prompt",
        "group-too-small",
    ),
    "more experts than responses": (
        lines(MIX, ONE + LONGEST, ("op: mix}", "op: mix, per_prompt: 2} #!")),
        "nodes.mix.per_prompt",
        "too-few-responses",
    ),
    "experts among conversations": (
        lines(
            MIX, ONE + LONGEST, ("n: 4, sampling", "n: 4, tools: [calculator], sampling"), ("op: mix}", "op: mix} #!")
        ),
        "nodes.mix",
        "mix-with-turns",
    ),
    "experts that say too much": (
        lines(MIX, ONE + "  max_response_tokens: 9 #!\n"),
        "data.max_response_tokens",
        "response-too-long",
    ),
}


@pytest.fixture
def offline(project, row):
    """The project with a file of responses, and ``offline(edits)`` to write the pipeline."""
    said = {"chosen": "2", "rejected": "3", "said": "4", "number": 2, "extra_info": {"answer": "2", "index": 0}}
    project.write_rows("train.parquet", [row | said] * 32)
    return project


@pytest.mark.parametrize("case", CASES)
def test_unworkable_pipelines_are_refused(offline, case: str) -> None:
    edits, place, *fragments = CASES[case]
    offline.assert_problem(offline.pipeline(*edits), place, *fragments)


def test_expert_responses_without_a_loss_are_reported(offline) -> None:
    path = offline.pipeline(*lines(MIX, ONE + LONGEST, (", sft_coef: 0.1", "")))
    assert "mix-not-trained-on" in [warning.code for warning in check_file(path).warnings]


def test_an_unused_rollout_is_reported_and_may_be_greedy(offline) -> None:
    greedy = ("max_new_tokens: 8}", "max_new_tokens: 8, temperature: 0}")
    path = offline.pipeline(*lines(SFT + SAMPLED, ONE + LONGEST, greedy))
    assert ("nodes.rollout", "unused-rollout") in [(each.place, each.code) for each in check_file(path).warnings]


def test_neither_answers_nor_prompts_need_be_there_where_nothing_is_sampled(offline) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    offline.write_rows("train.parquet", [{"messages": chat}] * 32)
    check_file(offline.pipeline(*lines(SFT, ONE + LONGEST, ("[chosen]", "[messages]")), *NO_GENERATOR))


def test_no_rollout_and_no_responses_is_an_error(offline) -> None:
    path = offline.pipeline(*lines(SFT, ""), *NO_GENERATOR)
    assert "missing-rollout" in [problem.code for problem in offline.problems(path)]
