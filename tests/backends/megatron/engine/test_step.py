"""Log-probs, loss and every gradient are those of the Hugging Face model on one process, whatever the layout."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.data.batch import Batch

NO_CLIP = {"clip_grad": 0.0, "use_distributed_optimizer": False}
BUDGET, SMALL_BUDGET = 1000, 24
VOCABULARY = 61

LAYOUTS = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 with sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp2 x tp2 with sequence parallel": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "dp2 x cp2": (4, {"context_parallel_size": 2}),
    "tp2 with fused logits": (2, {"tensor_model_parallel_size": 2}, {"fused_linear_cross_entropy": True}),
    "sp2 with fused logits": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"fused_linear_cross_entropy": True},
    ),
    # Without Transformer Engine fp8 changes the padding alone.
    "sp2 padded for fp8": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"transformer": {"fp8": "hybrid"}},
    ),
}


@pytest.mark.parametrize(
    ("fp8", "recipe", "tokens"),
    [
        (None, "delayed", [1, 130, 500]),
        ("hybrid", "delayed", [64, 192, 512]),
        ("e4m3", "tensorwise", [64, 192, 512]),
        ("hybrid", "blockwise", [512, 512, 512]),
    ],
)
def test_each_rank_has_a_multiple_of_tokens_in_fp8(fp8: str | None, recipe: str, tokens: list[int]) -> None:
    from dagrl.backends.megatron.engine.step import PackedModel

    sizes = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "num_moe_experts": None}
    config = SimpleNamespace(fp8=fp8, fp8_recipe=recipe, moe_token_dispatcher_type="alltoall", **sizes)
    model = PackedModel([SimpleNamespace(config=config)], 64, 8)
    assert model._agree_on_tokens([1, 130, 500]) == tokens


def rows_of_this_rank(batch: Batch) -> Batch:
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return batch.take(np.arange(rank, len(batch), size))


def all_rows_on_the_first_rank(batch: Batch) -> Batch:
    from megatron.core import parallel_state

    return batch.take(np.arange(len(batch) if parallel_state.get_data_parallel_rank() == 0 else 0))


@pytest.fixture(scope="module")
def heated(samples: Batch) -> Batch:
    """The samples with temperatures of three sources."""
    from dagrl.data.batch import Column

    return samples.with_columns({"temperature": Column(np.resize(np.float32([0.5, 0.8, 1.3]), len(samples)))})


TOP_K = 5
DISTILLED = {
    "forward": {"divergence": "forward_kl", "outside": "ignore", "min_logprob": -10},
    "reverse": {"divergence": "reverse_kl", "outside": "zero"},
    "mixed": {"divergence": "mixed_kl", "alpha": 0.3},
    "jsd": {"divergence": "jsd", "outside": "renormalize", "is_clip": 1.1},
    "whole forward": {"divergence": "forward_kl", "over": "vocabulary"},
    "whole mixed": {"divergence": "mixed_kl", "alpha": 0.3, "over": "vocabulary"},
    "whole jsd": {"divergence": "jsd", "over": "vocabulary", "is_clip": 1.1},
}
TEACHER_WIDTH = 48


def given_teacher() -> Any:
    """A teacher of another width."""
    from dagrl.config.schema import ModelSpec

    sizes = {"hidden_size": TEACHER_WIDTH, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}
    init = {"model_type": "qwen3", "vocab_size": VOCABULARY, "head_dim": 16, "tie_word_embeddings": True, **sizes}
    return ModelSpec.model_validate({"init": init, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


def teacher_states(tokens: int) -> np.ndarray:
    """Hidden states that make distributions with several likely tokens, as bits of bfloat16."""
    random = np.random.default_rng(5)
    return torch.from_numpy(15 * random.normal(size=(tokens, TEACHER_WIDTH))).bfloat16().view(torch.int16).numpy()


@pytest.fixture(scope="module")
def taught(heated: Batch) -> Batch:
    """Rows with a teacher's five likeliest tokens at each place, fewer at some, and none in one row."""
    from dagrl.data.batch import Column

    random, offsets = np.random.default_rng(4), heated["response_tokens"].offsets
    teacher = torch.log_softmax(torch.from_numpy(2 * random.normal(size=(int(offsets[-1]), VOCABULARY))), dim=1)
    logprob, ids = (each.numpy().copy() for each in teacher.topk(TOP_K, dim=1))
    ids[::4, 3:], logprob[::4, 3:] = -1, -np.inf
    old = -random.exponential(2.0, len(ids))
    mask = np.ones(len(heated), dtype=np.float32)
    mask[2] = 0
    columns = {
        "teacher_topk_ids": ids.astype(np.int32),
        "teacher_topk_logprob": logprob.astype(np.float32),
        "old_logprob": old.astype(np.float32),
    }
    # As `op: logprob` fills in rows that it has not read: NaN.
    states, unread = teacher_states(len(ids)), slice(int(offsets[2]), int(offsets[3]))
    states[unread] = -1
    columns["teacher_hidden_states"] = states
    given = {name: Column(values, offsets) for name, values in columns.items()}
    return heated.with_columns({**given, "teacher_mask": Column(mask)})


def distilling(name: str, *, by_rows: bool = False) -> Any:
    """An objective of the teacher's distributions alone; `by_rows` hides that it is a sum over tokens."""
    from dagrl.algorithms.objective import PolicyObjective
    from dagrl.config.schema import LossSpec

    class ByRows(PolicyObjective):
        def token_loss(self) -> None:
            return None

    available = ("old_logprob", "teacher_topk_ids", "teacher_topk_logprob", "teacher_hidden_states", "teacher_mask")
    loss = LossSpec.model_validate({"policy": "none", "distillation": DISTILLED[name]})
    return (ByRows if by_rows else PolicyObjective)(loss, 0.8, available, needs_entropy=False)


@pytest.fixture(scope="module")
def expected_of_taught(tiny_model, taught) -> dict[str, dict[str, Any]]:
    heat = taught["temperature"].values
    return {name: given_by_hugging_face(tiny_model, taught, distilling(name), heat) for name in DISTILLED}


@pytest.fixture(scope="module")
def expected(tiny_model, samples, objective) -> dict[str, Any]:
    """What Hugging Face's model gives at the objective's temperature."""
    return given_by_hugging_face(tiny_model, samples, objective, [objective.temperature] * len(samples))


@pytest.fixture(scope="module")
def expected_of_heated(tiny_model, heated, objective) -> dict[str, Any]:
    return given_by_hugging_face(tiny_model, heated, objective, heated["temperature"].values)


def given_by_hugging_face(tiny_model, samples, objective, temperatures) -> dict[str, Any]:
    """Log-probs, loss and gradients out of Hugging Face's model, row by row, by plain autograd."""
    from transformers import AutoModelForCausalLM

    from dagrl.backends.base import ResponseTokens
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.model_files.library_model import load_hf_config

    source = weight_source(tiny_model, 3)
    model = AutoModelForCausalLM.from_config(load_hf_config(tiny_model)).float()
    model.load_state_dict({name: source.get(name) for name in source.names()})
    whole = []
    for row in range(len(samples)):
        prompt, response = samples["prompt_tokens"][row], samples["response_tokens"][row]
        logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[0]
        whole.append(torch.log_softmax(logits[len(prompt) - 1 : -1] / float(temperatures[row]), dim=-1))
    log_p = torch.cat(whole)
    logprob = log_p.gather(1, torch.from_numpy(samples["response_tokens"].values)[:, None]).squeeze(1)
    candidates = None
    if objective.candidates:
        ids = torch.from_numpy(samples[objective.candidates].values).long()
        candidates = torch.where(ids < 0, -torch.inf, log_p.gather(1, ids.clamp(min=0)))
    divergence = None
    if objective.whole_divergence:
        divergence = plain_divergence(objective.loss.distillation, log_p, samples, temperatures)
    weights, (normalizer,) = objective.token_weights(samples)
    tokens = ResponseTokens(
        logprob=logprob,
        entropy=-(log_p.exp() * log_p).sum(1),
        weight=torch.from_numpy(weights.values) / normalizer,
        columns={name: torch.from_numpy(samples[name].values) for name in objective.columns},
        row=torch.from_numpy(np.repeat(np.arange(12), samples["response_tokens"].lengths)),
        candidate_logprob=candidates,
        divergence=divergence,
    )
    loss, _ = objective(tokens)
    loss.backward()
    return {
        "logprobs": logprob.detach().numpy(),
        "distributions": log_p.detach(),
        "loss": loss.item(),
        "gradients": {name: parameter.grad.numpy() for name, parameter in model.named_parameters()},
    }


def plain_divergence(distillation: Any, log_p: torch.Tensor, samples: Batch, temperatures: Any) -> torch.Tensor:
    """With all tokens as candidates, and the teacher's whole output layer."""
    from dagrl.algorithms.distillation import candidate_divergence
    from dagrl.backends.runtime.initial_weights import weight_source

    states = torch.from_numpy(samples["teacher_hidden_states"].values).view(torch.bfloat16).float().nan_to_num()
    heat = torch.from_numpy(np.repeat(np.float32(temperatures), samples["response_tokens"].lengths))
    teacher = states @ weight_source(given_teacher(), 3).get("model.embed_tokens.weight").t() / heat[:, None]
    over_topk = distillation.model_copy(update={"over": "topk", "outside": "ignore"})
    there = torch.ones_like(log_p, dtype=torch.bool)
    return candidate_divergence(over_topk, log_p, torch.log_softmax(teacher, dim=1), there)


def compute(engine: Any, batch: Batch, objective: Any, budget: int) -> dict[str, Any]:
    from gradients import gradients_and_sums

    from dagrl.backends.megatron.engine.loss import join_replicas

    gradients, sums = gradients_and_sums(engine, batch, objective, tokens_per_micro_batch=budget)
    return {"metrics": join_replicas(sums), "gradients": gradients}


def outputs_of(engine: Any, batch: Batch) -> dict[str, Any]:
    """Further outputs: statistics and likeliest tokens, more of these than there are, and those at given ids."""
    from dagrl.backends.base import TokenOutputs

    how = {"temperature": 0.8, "tokens_per_micro_batch": SMALL_BUDGET}
    return {
        "likeliest": engine.token_outputs(batch, TokenOutputs(TOP_K, entropy=True, square_sum=True), **how),
        "all": engine.token_outputs(batch, TokenOutputs(VOCABULARY + 3), **how),
        "given": engine.token_outputs(batch, TokenOutputs(at="teacher_topk_ids", entropy=True), **how),
        "hidden": engine.token_outputs(batch, TokenOutputs(hidden=True), **how),
        "no rows": engine.token_outputs(batch.take(np.arange(0)), TokenOutputs(TOP_K), **how),
    }


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "_"))
def computed(
    request, run_engine: Callable[..., list[Any]], samples: Batch, heated: Batch, taught: Batch, objective: Any
) -> list[dict[str, Any]]:
    """Each rank's results in a layout: log-probs, and gradients for two budgets and for all rows on one rank."""
    world_size, parallel, *fields = LAYOUTS[request.param]
    # Fused logits are then computed again in the backward pass.
    by_rows = replace(objective, is_sum_over_tokens=False)

    def on_rank(engine: Any) -> dict[str, Any]:
        mine = rows_of_this_rank(samples)
        return {
            "rows": mine.rows,
            "logprobs": engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=SMALL_BUDGET),
            "large": compute(engine, mine, objective, BUDGET),
            "small": compute(engine, mine, objective, SMALL_BUDGET),
            "heated logprobs": engine.logprobs(
                rows_of_this_rank(heated), temperature=0.8, tokens_per_micro_batch=BUDGET
            ),
            "heated": compute(engine, rows_of_this_rank(heated), objective, SMALL_BUDGET),
            "heated by rows": compute(engine, rows_of_this_rank(heated), by_rows, BUDGET),
            "outputs": outputs_of(engine, rows_of_this_rank(taught)),
            "distilled": {
                name: compute(engine, rows_of_this_rank(taught), distilling(name), SMALL_BUDGET) for name in DISTILLED
            },
            "distilled by rows": {
                name: compute(engine, rows_of_this_rank(taught), distilling(name, by_rows=True), BUDGET)
                for name in ("reverse", "jsd", "whole jsd")
            },
            "uneven": compute(engine, all_rows_on_the_first_rank(samples), by_rows, SMALL_BUDGET),
        }

    given = {"parallel": parallel, "optimizer": NO_CLIP, "teacher": given_teacher(), **dict(*fields)}
    return run_engine(world_size, on_rank, **given)


@pytest.mark.parametrize("what", ["logprobs", "heated logprobs"])
def test_log_probs_are_those_of_hugging_face(computed, samples: Batch, expected, expected_of_heated, what) -> None:
    from dagrl.data.batch import Column

    reference = expected if what == "logprobs" else expected_of_heated
    column = Column(reference["logprobs"], samples["response_tokens"].offsets)
    for rank in computed:
        np.testing.assert_allclose(rank[what].values, column.take(rank["rows"] - 100).values, rtol=0, atol=1e-5)
        assert rank[what].values.dtype == np.float32


@pytest.mark.parametrize("how", ["large", "small", "uneven", "heated", "heated by rows"])
def test_loss_and_every_gradient_are_those_of_one_process(computed, expected, expected_of_heated, how: str) -> None:
    expected = expected_of_heated if how.startswith("heated") else expected
    for rank in computed:
        assert rank[how]["metrics"] == computed[0][how]["metrics"], "the same on every rank, to the bit"
    assert computed[0][how]["metrics"]["loss"].total == pytest.approx(expected["loss"], rel=1e-5)
    found = computed[0][how]["gradients"]
    assert found.keys() == expected["gradients"].keys()
    for name, reference in expected["gradients"].items():
        error = np.abs(found[name].numpy() - reference).max() / np.abs(reference).max()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_metrics_count_each_response_token_once(computed, samples: Batch, expected) -> None:
    nll = computed[0]["uneven"]["metrics"]["nll"]
    assert nll.count == len(samples["response_tokens"].values)
    assert nll.total == pytest.approx(-expected["logprobs"].sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(("distilled", name) for name in DISTILLED),
        *(("distilled by rows", name) for name in ("reverse", "jsd", "whole jsd")),
    ],
)
def test_divergences_have_the_gradient_of_whole_distributions(
    computed, expected_of_taught, how: str, name: str
) -> None:
    found, expected = computed[0][how][name], expected_of_taught[name]
    loss = found["metrics"]["distillation/loss"]
    assert loss.count > 0
    assert found["gradients"].keys() == expected["gradients"].keys()
    for weight, reference in expected["gradients"].items():
        error = np.abs(found["gradients"][weight].numpy() - reference).max() / np.abs(reference).max()
        assert error < 1e-5, f"{weight}: {error:.1e}"


def test_a_teachers_output_layer_sleeps_with_the_students_weights(run_engine, taught: Batch) -> None:
    def on_rank(engine: Any) -> tuple[torch.Tensor, int, torch.Tensor]:
        weight = engine._model.teacher.weight
        before = weight.clone()
        engine.sleep()
        held = weight.untyped_storage().nbytes()
        engine.wake()
        compute(engine, taught, distilling("whole jsd"), BUDGET)
        return before, held, weight

    ((before, held, after),) = run_engine(1, on_rank, teacher=given_teacher(), optimizer=NO_CLIP)
    assert held == 0 and before.abs().sum() > 0
    assert torch.equal(before, after)


def test_further_outputs_are_those_of_whole_distributions(
    computed, tiny_model, taught: Batch, expected_of_taught
) -> None:
    from dagrl.backends.runtime.initial_weights import weight_source
    from dagrl.data.batch import Column

    head = weight_source(tiny_model, 3).get("lm_head.weight")

    offsets = taught["response_tokens"].offsets
    log_p = Column(expected_of_taught["jsd"]["distributions"].numpy(), offsets)
    for rank in computed:
        of_rank = torch.from_numpy(log_p.take(rank["rows"] - 100).values)
        mine = taught.take(rank["rows"] - 100)
        outputs = rank["outputs"]
        entropy = -(of_rank.exp() * of_rank).sum(1).numpy()
        likeliest = outputs["likeliest"]
        assert list(likeliest) == ["logprob", "entropy", "prob_square_sum", "topk_ids", "topk_logprob"]
        np.testing.assert_allclose(likeliest["entropy"].values, entropy, rtol=0, atol=1e-5)
        np.testing.assert_allclose(outputs["given"]["entropy"].values, entropy, rtol=0, atol=1e-5)
        states = torch.from_numpy(outputs["hidden"]["hidden_states"].values).view(torch.bfloat16).float()
        heat = torch.from_numpy(np.repeat(mine["temperature"].values, mine["response_tokens"].lengths))
        # Rounded to bfloat16.
        again = torch.log_softmax(states @ head.t() / heat[:, None], dim=1)
        torch.testing.assert_close(again, of_rank, rtol=0, atol=0.03)
        squares = of_rank.exp().square().sum(1).numpy()
        np.testing.assert_allclose(likeliest["prob_square_sum"].values, squares, rtol=0, atol=1e-5)
        for k, name in ((TOP_K, "likeliest"), (VOCABULARY, "all")):
            logprob, ids = of_rank.topk(k, dim=1)
            found = outputs[name]
            np.testing.assert_allclose(found["topk_logprob"].values[:, :k], logprob, rtol=0, atol=1e-5)
            assert np.array_equal(found["topk_ids"].values[:, :k], ids)
            assert (found["topk_ids"].values[:, k:] == -1).all() and np.isneginf(
                found["topk_logprob"].values[:, k:]
            ).all()
            assert (found["topk_ids"].values.dtype, found["topk_logprob"].values.dtype) == ("int32", "float32")
            assert np.array_equal(found["topk_ids"].lengths, mine["response_tokens"].lengths)
        ids = mine["teacher_topk_ids"].values
        given = of_rank.gather(1, torch.from_numpy(ids).long().clamp(min=0)).numpy()
        given = np.where(ids < 0, -np.inf, given)
        np.testing.assert_allclose(outputs["given"]["topk_logprob"].values, given, rtol=0, atol=1e-5)
        assert np.array_equal(outputs["given"]["topk_ids"].values, ids)
        assert outputs["no rows"]["topk_ids"].values.shape == (0, TOP_K)
