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
        "nothing says how long these may be; add `max_response_tokens`",
    ),
    "named twice": (
        (*lines(SFT, ONE + LONGEST, ("[chosen]", "[chosen, chosen] #!")), *NO_GENERATOR),
        "data.responses",
        "`chosen` is named twice",
    ),
    "longest of nothing": (
        lines(NODES, LONGEST, (": 6\n", ": 6 #!\n")),
        "data.max_response_tokens",
        "has no effect without `responses`",
    ),
    "what is too long of nothing": (
        lines(NODES, "  overlong_responses: cut #!\n"),
        "data.overlong_responses",
        "has no effect without `responses`",
    ),
    "a single response": (
        (*lines(DPO, ONE + LONGEST, ("[chosen]", "[chosen] #!")), *NO_GENERATOR),
        "data.responses",
        "`dpo` compares two responses to a prompt, and there is 1; name two columns, the better one first",
    ),
    "smoothing of another loss": (
        (
            *lines(DPO, TWO + LONGEST, ("engine: actor}", "engine: actor, loss: ipo, label_smoothing: 0.1} #!")),
            *NO_GENERATOR,
        ),
        "nodes.dpo.label_smoothing",
        "`loss: ipo` has no use for it",
    ),
    "a pair is too long for a micro-batch": (
        (
            *lines(DPO, TWO + LONGEST, ("engine: actor}", "engine: actor, tokens_per_micro_batch: 43} #!")),
            *NO_GENERATOR,
        ),
        "nodes.dpo.tokens_per_micro_batch",
        "43 tokens cannot hold the longest 2 samples of a prompt, 44 (2 x (data.max_prompt_tokens + "
        "data.max_response_tokens)); set it to 44 or more",
    ),
    "log-probs of demonstrations are too long": (
        (*lines(DPO, TWO + LONGEST, ("ref_logprob}", "ref_logprob, tokens_per_micro_batch: 21} #!")), *NO_GENERATOR),
        "nodes.ref.tokens_per_micro_batch",
        "21 tokens cannot hold the longest sample, 22 (data.max_prompt_tokens + data.max_response_tokens); set it to",
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
        "`dpo` tells its loss on two responses to a validation prompt, and `rollout` gives it 1; set `val_n: 2`",
    ),
    "nothing to tell": (
        (
            *lines(SFT, ONE + LONGEST + "  val: train.parquet\n", ("actor}", "actor, val_loss: false}")),
            ("run: {steps: 10}", "run: {steps: 10, validate_every: 5} #!"),
            *NO_GENERATOR,
        ),
        "run.validate_every",
        "nothing is told of validation prompts; take `val_loss: false` out",
    ),
    "response column that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[choosen]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "has no column `choosen` with responses (data.responses); did you mean `chosen`?",
    ),
    "response field that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[extra_info.anser]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "has no column `extra_info.anser` with responses (data.responses); did you mean `extra_info.answer`?",
    ),
    "response field of a struct that is not there": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[extra.answer]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "has no column `extra.answer` with responses (data.responses); ",
    ),
    "responses that are numbers": (
        (
            *lines(SFT, ONE + LONGEST, ("[chosen]", "[number]")),
            *NO_GENERATOR,
            ("train: train.parquet", "train: train.parquet #!"),
        ),
        "data.train",
        "has responses of type int64 in `number`; they must be text, or chats",
    ),
    "no demonstrations": (
        (
            *lines(NODES + "  sft: {op: sft, engine: other} #!\n", ""),
            ("  reference:", "  other: {backend: megatron, group: train, optimizer: {lr: 1e-3}}\n  reference:"),
        ),
        "nodes.sft",
        "column `demonstration` is read by `sft`, but no node writes it; name the columns of the data set that hold "
        "responses in `data.responses`",
    ),
    "log-probs of responses that nobody samples": (
        (
            *lines(DPO, TWO + LONGEST, (REF, "  ref: {op: logprob, engine: reference, write: ref_logprob} #!\n")),
            *NO_GENERATOR,
        ),
        "nodes.ref",
        "column `response_tokens` is read by `ref`, but no node writes it; take the data set's responses with `read: "
        "{response_tokens: demonstration}`",
    ),
    "trained twice": (
        lines(NODES + "  sft: {op: sft, engine: actor} #!\n", ONE + LONGEST),
        "nodes.sft.engine",
        "`actor` is trained by `update` already; keep one node that trains it",
    ),
    "no expert to learn from": (
        lines(NODES, "", ("kl_coef: 0.01}}", "kl_coef: 0.01, sft_coef: 0.1}} #!")),
        "nodes.update",
        "column `is_expert` is read by `update`, but no node writes it; add a node `{op: mix}`",
    ),
    "experts of nothing": (
        lines(f"{SFT}{SAMPLED}  mix: {{op: mix}} #!\n", ONE + LONGEST),
        "nodes.mix",
        "nothing is trained on samples among which it could put the data set's",
    ),
    "experts without a rollout": (
        (*lines(DPO + "  mix: {op: mix} #!\n", TWO + LONGEST), *NO_GENERATOR),
        "nodes.mix",
        "nothing is trained on samples among which it could put the data set's",
    ),
    "experts that take nobody's place": (
        lines(MIX, ONE + LONGEST, ("n: 4,", "n: 4, write: {response_tokens: mine},"), ("op: mix}", "op: mix} #!")),
        "nodes.mix",
        "column `response_tokens` is read by `mix`, but no node writes it; add a node `{op: rollout}`",
    ),
    "too many experts": (
        lines(MIX, ONE + LONGEST, ("op: mix}", "op: mix, per_prompt: 3} #!"), ("[chosen]", "[chosen, rejected, said]")),
        "nodes.mix.per_prompt",
        "3 of the 4 responses to a prompt (nodes.rollout.n) would be an expert's",
    ),
    "more experts than responses": (
        lines(MIX, ONE + LONGEST, ("op: mix}", "op: mix, per_prompt: 2} #!")),
        "nodes.mix.per_prompt",
        "the data set has 1 for each prompt (data.responses); name more columns, or lower this",
    ),
    "experts among conversations": (
        lines(
            MIX, ONE + LONGEST, ("n: 4, sampling", "n: 4, tools: [calculator], sampling"), ("op: mix}", "op: mix} #!")
        ),
        "nodes.mix",
        "experts' responses have no turns; take `tools` and `environment` out of `rollout`, or this out",
    ),
    "experts that say too much": (
        lines(MIX, ONE + "  max_response_tokens: 9 #!\n"),
        "data.max_response_tokens",
        "9 tokens are more than a sample may have (nodes.rollout.sampling.max_new_tokens = 8)",
    ),
}


@pytest.fixture
def offline(project, row):
    """The project with a file of responses, and ``offline(edits)`` to write the pipeline."""
    said = {"chosen": "2", "rejected": "3", "said": "4", "number": 2, "extra_info": {"answer": "2", "index": 0}}
    project.write_rows("train.parquet", [row | said] * 32)
    return project


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused(offline, case: str) -> None:
    edits, place, *fragments = CASES[case]
    offline.assert_problem(offline.pipeline(*edits), place, *fragments)


def test_experts_that_nobody_learns_from_are_told(offline) -> None:
    path = offline.pipeline(*lines(MIX, ONE + LONGEST, (", sft_coef: 0.1", "")))
    told = [warning.message for warning in check_file(path).warnings]
    assert any("no update learns from what it mixes in; set `sft_coef`" in message for message in told)


def test_a_rollout_that_is_of_no_use_is_told_and_may_be_greedy(offline) -> None:
    greedy = ("max_new_tokens: 8}", "max_new_tokens: 8, temperature: 0}")
    path = offline.pipeline(*lines(SFT + SAMPLED, ONE + LONGEST, greedy))
    told = {warning.place: warning.message for warning in check_file(path).warnings}
    assert told["nodes.rollout"].startswith("nothing is trained on what it samples, and nothing is validated; set")


def test_neither_answers_nor_prompts_need_be_there_where_nothing_is_sampled(offline) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    offline.write_rows("train.parquet", [{"messages": chat}] * 32)
    check_file(offline.pipeline(*lines(SFT, ONE + LONGEST, ("[chosen]", "[messages]")), *NO_GENERATOR))


def test_no_rollout_and_no_responses_is_an_error(offline) -> None:
    path = offline.pipeline(*lines(SFT, ""), *NO_GENERATOR)
    messages = [problem.message for problem in offline.problems(path)]
    assert any("no node samples responses; add `rollout: " in message for message in messages)
    assert any("or learn from the data set's with `data.responses`" in message for message in messages)
