"""Every parallel layout equals one process: log-probs, loss and each gradient, on a packed batch of uneven rows."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from layout_cases import DENSE, LATENT, LATENT_SHAPE, MIXTURE, SHARED_KEYS, parallel_of

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

BOUND = 1e-5
BUDGET = 48

ROUTER_LOSSES = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}


def model_of(family: str, **changes: Any) -> ModelSpec:
    """Four layers, a vocabulary of 61 tokens that has to be padded, and weights with room between experts."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    shape |= LATENT_SHAPE if family == "deepseek_v3" else {"head_dim": 8}
    groups = 4 if family == "deepseek_v3" else 2
    heads = {"num_attention_heads": 4, "num_key_value_heads": groups, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    fields = {"model_type": family, "vocab_size": 61, "initializer_range": 0.15, "pad_token_id": None, **shape, **heads}
    fields |= (experts if "moe" in family else {}) | changes
    return ModelSpec.model_validate({"init": fields, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


Measure = Callable[..., tuple[dict[str, Any], dict[str, float], dict[int, np.ndarray]]]


@pytest.fixture(scope="module")
def measure(run_engine: Callable[..., list[Any]], samples: "Batch", objective: Any) -> Measure:
    """``measure(ranks, layout, model, **spec)``: gradients by name, metrics, and each row's log-probs."""

    def run(
        ranks: int,
        layout: dict[str, Any],
        model: ModelSpec,
        rows: "Batch" = samples,
        budget: int = BUDGET,
        **spec: Any,
    ) -> Any:
        parallel = ParallelSpec.model_validate(parallel_of(layout))
        places = coordinates(parallel, ranks)
        replicas = parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            import torch.distributed as dist
            from gradients import gradients_and_sums

            from dagrl.backends.megatron.engine.loss import join_replicas

            place = places[dist.get_rank()]
            mine = rows.take(np.arange(place.dp, len(rows), replicas))
            logprobs = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=budget)
            gradients, sums = gradients_and_sums(engine, mine, objective, tokens_per_micro_batch=budget)
            metrics = {name: stat.mean for name, stat in join_replicas(sums).items()}
            by_row = {int(row): logprobs[i] for i, row in enumerate(mine.rows)}
            return gradients, metrics, by_row, place.primary

        spec.setdefault("optimizer", {"lr": 1e-3, "use_distributed_optimizer": False})
        answers = run_engine(ranks, on_rank, model=model, parallel=parallel.model_dump(), **spec)
        for _, metrics, _, _ in answers:
            assert metrics == answers[0][1], "metrics are the same on every rank"
        logprobs: dict[int, np.ndarray] = {}
        for _, _, by_row, primary in answers:
            if primary:
                assert not logprobs.keys() & by_row.keys(), "each row has one primary"
                logprobs |= by_row
        for (_, _, by_row, _), place in zip(answers, places, strict=True):
            for row, values in by_row.items():
                assert np.array_equal(values, logprobs[row]), f"rank at {place} reads other log-probs"
        gradients = {name: tensor.numpy() for name, tensor in answers[0][0].items()}
        return gradients, answers[0][1], logprobs

    return run


@pytest.fixture(scope="module")
def alone(measure: Measure) -> Callable[[str], Any]:
    """What one process gives, for a family."""
    return functools.cache(lambda family: measure(1, {}, model_of(family)))


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_model_in_any_layout_equals_one_process(layout: str, measure: Measure, alone: Any) -> None:
    ranks, sizes = DENSE[layout]
    assert_equal(measure(ranks, sizes, model_of("qwen3")), alone("qwen3"))


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "tp4"), ("qwen2", "tp4-sp"), *(("qwen3", layout) for layout in SHARED_KEYS)]
)
def test_more_ranks_than_key_heads_equal_one_process(family: str, layout: str, measure: Measure, alone: Any) -> None:
    """Two key heads: ranks hold parts of their projections, of biases (qwen2) too, and share their norm (qwen3)."""
    ranks, sizes = SHARED_KEYS[layout]
    measured = measure(ranks, sizes, model_of(family))
    assert ("model.layers.3.self_attn.k_proj.bias" in measured[0]) == (family == "qwen2")
    assert_equal(measured, alone(family))


@pytest.mark.parametrize("layout", MIXTURE)
def test_a_mixture_in_any_layout_equals_one_process(layout: str, measure: Measure, alone: Any) -> None:
    ranks, sizes = MIXTURE[layout]
    assert_equal(measure(ranks, sizes, model_of("qwen3_moe")), alone("qwen3_moe"))


@pytest.mark.parametrize("layout", LATENT)
def test_latent_attention_and_shared_experts_in_any_layout_equal_one_process(
    layout: str, measure: Measure, alone: Any
) -> None:
    ranks, sizes = LATENT[layout]
    assert_equal(measure(ranks, sizes, model_of("deepseek_v3")), alone("deepseek_v3"))


@pytest.fixture(scope="module")
def without_padding(samples: "Batch") -> "Batch":
    """Rows of 8 or 16 tokens: no layout pads them, so that each has the same tokens to route."""
    from dagrl.data.batch import Batch, Column

    random = np.random.default_rng(6)
    responses = random.integers(2, 8, len(samples))
    prompts = random.choice([8, 16], len(samples)) - responses
    return Batch(
        samples.rows,
        {
            "prompt_tokens": Column.ragged([random.integers(0, 61, n) for n in prompts], "int64"),
            "response_tokens": Column.ragged([random.integers(0, 61, n) for n in responses], "int64"),
            "response_mask": Column.ragged([np.ones(n) for n in responses], "float32"),
            "advantage": Column.ragged([random.normal(size=n) for n in responses], "float32"),
            "reward": samples["reward"],
        },
    )


@pytest.fixture(scope="module")
def with_router_losses(measure: Measure, without_padding: "Batch") -> Callable[[str], Any]:
    """``with_router_losses(layout)``: what `measure` gives of a mixture whose routers have losses."""
    layouts = {"one": (1, {}), **DENSE, **MIXTURE}
    given = {"model": model_of("qwen3_moe"), "rows": without_padding, "transformer": ROUTER_LOSSES}
    return functools.cache(lambda layout: measure(*layouts[layout], **given))


def test_the_losses_of_routers_have_a_gradient(measure: Measure, with_router_losses: Any, without_padding: Any) -> None:
    gradients, metrics, _ = with_router_losses("one")
    assert {"moe/aux_loss", "moe/z_loss"} < metrics.keys()
    plain = measure(1, {}, model_of("qwen3_moe"), without_padding)
    router = "model.layers.0.mlp.gate.weight"
    assert distance(gradients[router], plain[0][router]) > 0.01


@pytest.mark.parametrize("layout", ["tp2", "ep2-tp2", "pp2", "cp2", "tp2-cp2-ep4"])
def test_the_losses_of_routers_are_the_same_in_any_layout(layout: str, with_router_losses: Any) -> None:
    """Replicas pack other micro-batches, and a router's loss is one of a micro-batch: so layouts have one replica."""
    assert_equal(with_router_losses(layout), with_router_losses("one"))


@pytest.fixture(scope="module")
def conversations(samples: "Batch") -> "Batch":
    """Three groups of four rows with a prompt each, one of which branches after its first turn."""
    from dagrl.data.batch import Batch, Column

    random = np.random.default_rng(8)
    prompts = [random.integers(0, 61, n) for n in (17, 30, 41)]
    turns = {5: random.integers(0, 61, 20)}
    turns |= dict.fromkeys((6, 7), turns[5])
    responses = [np.append(turns.get(row, [])[:20], random.integers(0, 61, row + 1)) for row in range(12)]
    return Batch(
        samples.rows,
        {
            "prompt_tokens": Column.ragged([prompts[row // 4] for row in range(12)], "int64"),
            "response_tokens": Column.ragged(responses, "int64"),
            "response_mask": Column.ragged([np.ones(len(each)) for each in responses], "float32"),
            "advantage": Column.ragged([random.normal(size=len(each)) for each in responses], "float32"),
            "reward": samples["reward"],
        },
    )


@pytest.fixture(scope="module")
def whole_rows(measure: Measure, conversations: "Batch") -> Callable[[str], Any]:
    """One process, with each row computed by itself."""
    return functools.cache(lambda family: measure(1, {}, model_of(family), conversations, 128))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3", layout) for layout in ("one", "dp2", "tp2-sp", "pp2-vpp2", "cp2", "tp2-pp2-cp2")),
        *(("qwen3_moe", layout) for layout in ("ep2-tp2", "cp2-ep2")),
        *(("deepseek_v3", layout) for layout in ("one", "cp2-ep2")),
    ],
)
def test_shared_prefixes_in_any_layout_equal_whole_rows(
    family: str, layout: str, measure: Measure, conversations: "Batch", whole_rows: Any
) -> None:
    layouts = {"one": (1, {}), **DENSE, **MIXTURE}
    measured = measure(*layouts[layout], model_of(family), conversations, 128, prefix_sharing=True)
    assert_equal(measured, whole_rows(family))


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of logits in each chunk."""
    from dagrl.backends.megatron.engine import output

    monkeypatch.setattr(output, "VocabColumns", functools.partial(output.VocabColumns, chunk_elements=150))


FUSED = {"fused_linear_cross_entropy": True}


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("layout", ["tp2-sp", "tp2-pp2-vpp2", "tp2-pp2-cp2"])
def test_logits_in_chunks_in_any_layout_equal_whole_ones(
    layout: str, measure: Measure, conversations: "Batch", whole_rows: Any
) -> None:
    # Outputs that several rows share are the hardest to assign to chunks.
    given = {**FUSED, "prefix_sharing": True}
    assert_equal(measure(*DENSE[layout], model_of("qwen3"), conversations, 128, **given), whole_rows("qwen3"))


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("layout", ["tp2-sp", "cp2-pp2-vpp2"])
def test_logits_of_tied_embeddings_in_chunks_equal_whole_ones(layout: str, measure: Measure) -> None:
    tied = model_of("qwen3", tie_word_embeddings=True)
    assert_equal(measure(*DENSE[layout], tied, **FUSED), measure(1, {}, tied))


@pytest.fixture(scope="module")
def with_candidates(conversations: "Batch") -> "Batch":
    """The conversations with four token ids at each place, others in each row, some of them missing."""
    from dagrl.data.batch import Column

    random, offsets = np.random.default_rng(9), conversations["response_tokens"].offsets
    ids = random.permuted(np.tile(np.arange(61), (int(offsets[-1]), 1)), axis=1)[:, :4].astype(np.int32)
    ids[::5, 2:] = -1
    teacher = np.where(ids < 0, -np.inf, -1 - random.exponential(1.0, ids.shape)).astype(np.float32)
    given = {"teacher_topk_ids": Column(ids, offsets), "teacher_topk_logprob": Column(teacher, offsets)}
    states = torch.from_numpy(random.normal(size=(len(ids), 32))).bfloat16().view(torch.int16)
    given["teacher_hidden_states"] = Column(states.numpy(), offsets)
    return conversations.with_columns(given)


def distilling(**further: Any) -> Any:
    from dagrl.algorithms.objective import PolicyObjective
    from dagrl.config.schema import LossSpec

    loss = {"policy": "reinforce", "distillation": {"divergence": "jsd", "alpha": 0.3, **further}}
    available = ("teacher_topk_ids", "teacher_topk_logprob", "teacher_hidden_states")
    return PolicyObjective(LossSpec.model_validate(loss), 0.8, available)


@pytest.fixture(scope="module")
def measure_candidates(run_engine: Callable[..., list[Any]], with_candidates: "Batch") -> Callable[..., Any]:
    """``measure_candidates(ranks, layout, **spec)``: gradients, metrics and the outputs of each row, by column."""

    def run(ranks: int, layout: dict[str, Any], **spec: Any) -> Any:
        parallel = ParallelSpec.model_validate(parallel_of(layout))
        places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            import torch.distributed as dist
            from gradients import gradients_and_sums

            from dagrl.backends.base import TokenOutputs
            from dagrl.backends.megatron.engine.loss import join_replicas
            from dagrl.data.batch import Column

            mine = with_candidates.take(np.arange(places[dist.get_rank()].dp, len(with_candidates), replicas))
            how = {"temperature": 0.8, "tokens_per_micro_batch": 128}
            found = engine.token_outputs(mine, TokenOutputs(6, entropy=True, square_sum=True), **how)
            given = engine.token_outputs(mine, TokenOutputs(at="teacher_topk_ids"), **how)
            found |= {f"given_{name}": column for name, column in given.items()}
            # bfloat16 rounds what ranks compute in another order.
            states = engine.token_outputs(mine, TokenOutputs(hidden=True), **how)["hidden_states"]
            states = torch.from_numpy(states.values).view(torch.bfloat16).float()
            found["hidden_sum"] = Column(states.sum(1).numpy() / 1000, mine["response_tokens"].offsets)
            whole, _ = gradients_and_sums(engine, mine, distilling(over="vocabulary"), tokens_per_micro_batch=128)
            gradients, sums = gradients_and_sums(engine, mine, distilling(), tokens_per_micro_batch=128)
            gradients |= {f"{name} of whole distributions": gradient for name, gradient in whole.items()}
            metrics = {name: stat.mean for name, stat in join_replicas(sums).items()}
            return gradients, metrics, mine.rows, found

        spec.setdefault("optimizer", {"lr": 1e-3, "use_distributed_optimizer": False})
        given = model_of("qwen3")
        answers = run_engine(ranks, on_rank, model=given, teacher=given, parallel=parallel.model_dump(), **spec)
        outputs: dict[str, dict[int, np.ndarray]] = {}
        for _, _, rows, found in answers:
            for name, column in found.items():
                for place, row in enumerate(rows):
                    known = outputs.setdefault(name, {}).setdefault(int(row), column[place])
                    assert np.array_equal(known, column[place]), f"ranks read other {name}"
        gradients = {name: tensor.numpy() for name, tensor in answers[0][0].items()}
        return gradients, answers[0][1], outputs

    return run


@pytest.fixture(scope="module")
def candidates_alone(measure_candidates: Callable[..., Any]) -> Any:
    return measure_candidates(1, {})


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("cp2", {}),
        ("pp2-vpp2", {"prefix_sharing": True}),
        ("cp2-tp2", {**FUSED, "prefix_sharing": True}),
        ("tp2-pp2", FUSED),
    ],
)
def test_likeliest_tokens_and_gradients_at_candidates_in_any_layout_equal_one_process(
    layout: str, spec: dict[str, Any], measure_candidates: Callable[..., Any], candidates_alone: Any
) -> None:
    gradients, metrics, outputs = measure_candidates(*DENSE[layout], **spec)
    expected, expected_metrics, expected_outputs = candidates_alone
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, expected[name]) <= BOUND, name
    assert metrics == pytest.approx(expected_metrics, rel=BOUND)
    assert outputs.keys() == expected_outputs.keys()
    for name, rows in outputs.items():
        assert rows.keys() == expected_outputs[name].keys() and len(rows) == 12
        for row, values in rows.items():
            np.testing.assert_allclose(values, expected_outputs[name][row], rtol=0, atol=BOUND, err_msg=name)


@pytest.mark.parametrize("recompute", [{"recompute_granularity": "full", "recompute_method": "uniform"}])
def test_layers_computed_again_find_their_own_pack(
    recompute: dict[str, Any], measure: Measure, conversations: "Batch", whole_rows: Any
) -> None:
    fields = {**recompute, "recompute_num_layers": 1}
    given = {"prefix_sharing": True, "transformer": fields}
    assert_equal(measure(2, {"pp": 2}, model_of("deepseek_v3"), conversations, 128, **given), whole_rows("deepseek_v3"))


def assert_equal(measured: Any, expected: Any) -> None:
    gradients, metrics, logprobs = measured
    assert gradients.keys() == expected[0].keys()
    assert len(gradients) > 20
    # The routers' correction is no parameter: it has no gradient.
    gradients = {name: tensor for name, tensor in gradients.items() if not name.endswith("e_score_correction_bias")}
    worst = max(gradients, key=lambda name: distance(gradients[name], expected[0][name]))
    assert distance(gradients[worst], expected[0][worst]) <= BOUND, worst
    assert metrics == pytest.approx(expected[1], rel=BOUND)
    assert logprobs.keys() == expected[2].keys()
    for row, values in logprobs.items():
        np.testing.assert_allclose(values, expected[2][row], rtol=0, atol=BOUND)


def distance(tensor: np.ndarray, other: np.ndarray) -> float:
    """Relative to the largest entry of the tensor."""
    assert tensor.shape == other.shape
    return float(np.abs(tensor - other).max() / np.abs(other).max())
