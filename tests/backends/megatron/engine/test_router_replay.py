"""Tokens go where they are told in any layout: as in Hugging Face's model with routers that do as they are told."""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

BOUND = 1e-5
BUDGET = 48
LAYERS, CHOSEN, EXPERTS = 4, 2, 8

LAYOUTS = {
    "alone": (1, {}),
    "tp2-ep2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
    "cp2-ep2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "dp2-pp2": (4, {"pipeline_model_parallel_size": 2}),
    "tp2-pp2-vpp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "tp2-cp2-etp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "context_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
        },
    ),
}
RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "one layer": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def model_of(family: str) -> ModelSpec:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    experts = {"num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if family == "deepseek_v3":
        # The first layer is dense; of the 2 groups of experts a token would choose one.
        shape |= {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        experts |= {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}
        experts |= {"topk_group": 1, "routed_scaling_factor": 2.5, "num_key_value_heads": 4}
    else:
        shape |= {"head_dim": 8, "num_key_value_heads": 2}
        experts |= {"num_experts": EXPERTS}
    fields = {"model_type": family, "vocab_size": 61, "initializer_range": 0.15, "pad_token_id": None}
    fields |= {"tie_word_embeddings": False, **shape, **experts}
    return ModelSpec.model_validate({"init": fields, "tokenizer": {"kind": "characters", "alphabet": "ab"}})


@pytest.fixture(scope="module")
def rows(samples: "Batch") -> "Batch":
    """The samples, with experts drawn by lot for each token; of one row nothing is known but that there were none."""
    from dagrl.data.batch import Column

    random = np.random.default_rng(9)
    lengths = samples["prompt_tokens"].lengths + samples["response_tokens"].lengths - 1
    drawn = [random.random((n, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN] for n in lengths]
    return samples.with_columns({"routed_experts": Column.ragged(drawn, "int16")})


def told_to(model: Any, family: str, routes: torch.Tensor) -> None:
    """Let the routers of Hugging Face's model choose what `routes` [tokens, layers, chosen] say."""

    def softmax_over_chosen(router: Any, chosen: torch.Tensor, hidden: torch.Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.t()
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    def share_of_sigmoids(chosen: torch.Tensor, logits: torch.Tensor) -> Any:
        scores = logits.sigmoid().gather(1, chosen)
        return chosen, 2.5 * scores / scores.sum(-1, keepdim=True)

    for number, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        chosen = routes[:, number].long()
        if family == "deepseek_v3":
            layer.mlp.route_tokens_to_experts = functools.partial(share_of_sigmoids, chosen)
        else:
            layer.mlp.gate.forward = functools.partial(softmax_over_chosen, layer.mlp.gate, chosen)


@pytest.fixture(scope="module")
def expected(rows: "Batch", objective: Any) -> Any:
    """``expected(family)``: log-probs, metrics and gradients of Hugging Face's model, row by row, by autograd."""

    @functools.cache
    def compute(family: str) -> dict[str, Any]:
        from transformers import AutoModelForCausalLM

        from dagrl.backends.base import ResponseTokens
        from dagrl.backends.runtime.initial_weights import weight_source
        from dagrl.data.tally import read_tallies
        from dagrl.model_files.library_model import load_hf_config, published_tensors

        source = weight_source(model_of(family), 3)
        model = AutoModelForCausalLM.from_config(load_hf_config(model_of(family))).float()
        for name, tensor in published_tensors(model).items():
            tensor.data.copy_(source.get(name))
        logprobs, entropies = [], []
        for row in range(len(rows)):
            prompt, response = rows["prompt_tokens"][row], rows["response_tokens"][row]
            # Where the last token goes has no influence on what is read before it.
            routes = np.concatenate([rows["routed_experts"][row], [[[0, 1]] * LAYERS]])
            told_to(model, family, torch.from_numpy(routes))
            logits = model(torch.from_numpy(np.concatenate([prompt, response]))[None]).logits[0]
            log_p = torch.log_softmax(logits[len(prompt) - 1 : -1] / objective.temperature, dim=-1)
            logprobs.append(log_p.gather(1, torch.from_numpy(response)[:, None]).squeeze(1))
            entropies.append(-(log_p.exp() * log_p).sum(1))
        weights, (normalizer,) = objective.token_weights(rows)
        tokens = ResponseTokens(
            logprob=torch.cat(logprobs),
            entropy=torch.cat(entropies),
            weight=torch.from_numpy(weights.values) / normalizer,
            columns={name: torch.from_numpy(rows[name].values) for name in objective.columns},
            row=torch.from_numpy(np.repeat(np.arange(len(rows)), rows["response_tokens"].lengths)),
        )
        loss, metrics = objective(tokens)
        loss.backward()
        for parameter in model.parameters():
            # An expert that nobody was sent to has none.
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return {
            "logprobs": [each.detach().numpy() for each in logprobs],
            "metrics": {name: stat.mean for name, stat in read_tallies([metrics]).items()},
            "gradients": {name: tensor.detach().numpy() for name, tensor in published_tensors(model).items()},
        }

    return compute


@pytest.fixture(scope="module")
def replay(run_engine: Any, rows: "Batch", objective: Any) -> Any:
    """``replay(layout, family, **spec)``: log-probs by row, metrics, gradients, and log-probs by its own choice."""

    def run(layout: str, family: str, **spec: Any) -> dict[str, Any]:
        ranks, sizes = LAYOUTS[layout]
        parallel = ParallelSpec.model_validate(sizes)
        places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

        def on_rank(engine: Any) -> Any:
            import torch.distributed as dist
            from gradients import gradients_and_sums

            from dagrl.backends.megatron.engine.loss import join_replicas

            mine = rows.take(np.arange(places[dist.get_rank()].dp, len(rows), replicas))
            logprobs = engine.logprobs(mine, temperature=0.8, tokens_per_micro_batch=BUDGET)
            gradients, metrics = gradients_and_sums(engine, mine, objective, tokens_per_micro_batch=BUDGET)
            return {
                "logprobs": {int(row) - 100: logprobs[i] for i, row in enumerate(mine.rows)},
                "gradients": {name: tensor.numpy() for name, tensor in gradients.items()},
                "metrics": {name: stat.mean for name, stat in join_replicas(metrics).items()},
            }

        optimizer = {"lr": 1e-3, "use_distributed_optimizer": False}
        given = {"parallel": sizes, "optimizer": optimizer, "router_replay": True, **spec}
        answers = run_engine(ranks, on_rank, model=model_of(family), **given)
        logprobs = {row: values for answer in answers for row, values in answer["logprobs"].items()}
        return {**answers[0], "logprobs": logprobs}

    return run


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for row, values in enumerate(expected["logprobs"]):
        np.testing.assert_allclose(found["logprobs"][row], values, rtol=0, atol=BOUND)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=BOUND)
    compared = {name for name in expected["gradients"] if not name.endswith("e_score_correction_bias")}
    assert compared <= found["gradients"].keys()
    for name in compared:
        gradient = expected["gradients"][name]
        assert np.abs(found["gradients"][name] - gradient).max() <= BOUND * max(np.abs(gradient).max(), 1e-3), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_go_to_the_given_experts(layout: str, replay: Any, expected: Any) -> None:
    assert_equal(replay(layout, "qwen3_moe"), expected("qwen3_moe"))


@pytest.mark.parametrize("what", RECOMPUTE)
def test_recomputed_tokens_go_to_the_same_experts(what: str, replay: Any, expected: Any) -> None:
    """Two stages have several micro-batches under way, each with its own routes, when the first comes back."""
    found = replay("tp2-pp2-vpp2" if what == "full" else "dp2-pp2", "qwen3_moe", transformer=RECOMPUTE[what])
    assert_equal(found, expected("qwen3_moe"))


@pytest.mark.parametrize("layout", ["tp2-ep2", "dp2-pp2"])
def test_dense_layers_groups_and_sigmoids(layout: str, replay: Any, expected: Any) -> None:
    """The routes of a dense layer are not looked at, and those of others may break the rule of groups."""
    assert_equal(replay(layout, "deepseek_v3"), expected("deepseek_v3"))


@pytest.fixture(scope="module")
def by_themselves(run_engine: Any, rows: "Batch", objective: Any) -> Any:
    """What a model does without being told, with the routes that it takes then, as one process sees them."""

    def on_rank(engine: Any) -> Any:
        from megatron.core.transformer.moe.router import TopKRouter

        from dagrl.data.batch import Column

        taken: list[Any] = []
        routers = [module for module in engine._model.chunks[0].modules() if isinstance(module, TopKRouter)]
        for router in routers:
            router.register_forward_hook(
                lambda _, given, result: taken.append(result[1].nonzero()[:, 1].view(-1, CHOSEN))
            )
        told = []
        for row in range(len(rows)):
            alone = rows.take(np.array([row])).select(["prompt_tokens", "response_tokens"])
            engine.logprobs(alone, temperature=1.0, tokens_per_micro_batch=BUDGET)
            told.append(torch.stack(taken, dim=1)[:-1].numpy())
            taken.clear()
        without = rows.select([name for name in rows.columns if name != "routed_experts"])
        return {
            "routes": Column.ragged(told, "int16"),
            "logprobs": engine.logprobs(without, temperature=0.8, tokens_per_micro_batch=BUDGET).values,
        }

    (answer,) = run_engine(1, on_rank, model=model_of("qwen3_moe"), optimizer={"lr": 1e-3})
    return answer


def test_its_own_routes_change_nothing(by_themselves: Any, run_engine: Any, rows: "Batch") -> None:
    """Nor do routes that nobody knows: of rows without any, of tokens without, and where there is no such column."""
    from dagrl.data.batch import Column

    own = by_themselves["routes"]
    assert not np.array_equal(own.values, rows["routed_experts"].values), "those of other tests are others"
    some = [own[row][:0] if row % 3 == 0 else own[row].copy() for row in range(len(own))]
    for row in range(1, len(own), 3):
        some[row][::2] = -1
    columns = {"own": own, "some": Column.ragged(some, "int16")}
    places = coordinates(ParallelSpec.model_validate(LAYOUTS["cp2-ep2"][1]), 2)

    def on_rank(engine: Any) -> Any:
        assert {place.dp for place in places} == {0}
        plain = rows.select([name for name in rows.columns if name != "routed_experts"])
        batches = {name: plain.with_columns({"routed_experts": column}) for name, column in columns.items()}
        batches["none"] = plain
        return {
            name: engine.logprobs(batch, temperature=0.8, tokens_per_micro_batch=BUDGET).values
            for name, batch in batches.items()
        }

    answers = run_engine(
        2,
        on_rank,
        model=model_of("qwen3_moe"),
        parallel=LAYOUTS["cp2-ep2"][1],
        optimizer={"lr": 1e-3},
        router_replay=True,
    )
    for found in answers:
        for values in found.values():
            np.testing.assert_allclose(values, by_themselves["logprobs"], rtol=0, atol=BOUND)


def test_routes_that_cannot_be_are_refused(run_engine: Any, rows: "Batch") -> None:
    from dagrl.data.batch import Column

    column = rows["routed_experts"]

    def changed(place: tuple[int, ...], value: int) -> Column:
        values = column.values.copy()
        values[place] = value
        return Column(values, column.offsets)

    wrong = {
        "one of them twice": changed((5, 2, 0), int(column.values[5, 2, 1])),
        "more than there are": changed((5, 2, 0), EXPERTS),
        "do both have the same model": Column(column.values[:, :3], column.offsets),
        "routes for": Column.ragged([column[row][1:] for row in range(len(column))], "int16"),
    }

    def on_rank(engine: Any) -> list[str]:
        messages = []
        for routes in wrong.values():
            batch = rows.with_columns({"routed_experts": routes})
            with pytest.raises(ValueError) as caught:
                engine.logprobs(batch, temperature=1.0, tokens_per_micro_batch=BUDGET)
            messages.append(str(caught.value))
        return messages

    given = {"model": model_of("qwen3_moe"), "optimizer": {"lr": 1e-3}, "router_replay": True}
    (messages,) = run_engine(1, on_rank, **given)
    for message, fragment in zip(messages, wrong, strict=True):
        assert fragment in message
