"""A critic's and a reward model's head: values, scores and gradients are those of Hugging Face's model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from squared_error import SquaredError
from tiny_models import tiny_scorer

from dagrl.backends.megatron.section import ParallelSpec, coordinates
from dagrl.config.schema import ModelSpec

if TYPE_CHECKING:
    from dagrl.data.batch import Batch

LAYOUTS = {
    "alone": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Hugging Face model with one score, and the folder that it is saved in."""
    model = tiny_scorer(4, vocab_size=61, initializer_range=0.15).float().eval()
    folder = tmp_path_factory.mktemp("scorer")
    model.save_pretrained(folder)
    return model, folder


def expected(model: Any, samples: "Batch", head: str) -> dict[str, Any]:
    """Values by row, loss and gradients, row by row, by plain autograd."""
    model.zero_grad()
    values = []
    for row in range(len(samples)):
        prompt, response = samples["prompt_tokens"][row], samples["response_tokens"][row]
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        scores = model.score(model.model(ids).last_hidden_state)[0, :, 0]
        values.append(scores[len(prompt) - 1 : -1] if head == "value" else scores[-1:])
    objective = SquaredError(head)
    weights, (normalizer,) = objective.token_weights(samples)
    target = torch.from_numpy(samples[objective.columns[0]].values)
    loss = (torch.from_numpy(weights.values) / normalizer * (torch.cat(values) - target).square()).sum()
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"values": [value.detach().numpy() for value in values], "loss": loss.item(), "gradients": gradients}


@pytest.mark.parametrize("head", ["value", "reward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_gradients_of_a_head_equal_hugging_faces(
    head: str, layout: str, scorer: tuple[Any, Path], run_engine: Any, samples: "Batch"
) -> None:
    from gradients import assert_same, gradients_and_sums

    from dagrl.backends.megatron.engine.loss import join_replicas

    model, folder = scorer
    ranks, sizes = LAYOUTS[layout]
    parallel = ParallelSpec.model_validate(sizes)
    places, replicas = coordinates(parallel, ranks), parallel.data_parallel_size(ranks)

    def on_rank(engine: Any) -> Any:
        mine = samples.take(np.arange(places[torch.distributed.get_rank()].dp, len(samples), replicas))
        values = engine.values(mine, tokens_per_micro_batch=30)
        gradients, sums = gradients_and_sums(engine, mine, SquaredError(head), tokens_per_micro_batch=30)
        rows = {int(row) - 100: np.atleast_1d(values[i]) for i, row in enumerate(mine.rows)}
        return rows, join_replicas(sums), gradients

    source = ModelSpec.model_validate({"path": folder, "tokenizer": {"kind": "characters", "alphabet": "ab"}})
    answers = run_engine(ranks, on_rank, model=source, parallel=sizes, head=head, optimizer={"lr": 1e-3})
    reference = expected(model, samples, head)
    for rows, metrics, _ in answers:
        for row, values in rows.items():
            np.testing.assert_allclose(values, reference["values"][row], rtol=0, atol=1e-5)
        assert metrics["loss"].total == pytest.approx(reference["loss"], rel=1e-5)
    assert_same(answers[0][2], reference["gradients"])


def test_outputs_of_a_head_are_not_rounded_to_the_weights_precision(run_ranks: Any) -> None:
    from types import SimpleNamespace

    from dagrl.backends.megatron.engine.output import ScalarHead

    head = ScalarHead(SimpleNamespace(hidden_size=64, params_dtype=torch.bfloat16))
    hidden = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    values = head(hidden)
    exact = hidden.double() @ head.weight.double().t()
    assert head.weight.dtype == torch.bfloat16 and values.dtype == torch.float32
    assert float((values.detach() - exact.detach()).abs().max()) < 1e-6
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
