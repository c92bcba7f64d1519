"""A family in one file of another package validates, plans, builds and loads like those of dagrl."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import run_packed, sequences

from dagrl.backends.families import registry
from dagrl.backends.families.flops import model_flops
from dagrl.validation import check_file

FILE = Path(__file__).with_name("smollm3_family.py")
FIELDS = {
    "model_type": "smollm3",
    "use_sliding_window": False,
    "pad_token_id": None,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 59,
    "tie_word_embeddings": False,
}


@pytest.fixture
def smollm3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the family, installed."""
    packages = tmp_path / "site-packages"
    info = packages / "smollm3_family-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / FILE.name).write_text(FILE.read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smollm3_family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dagrl.families]\nsmollm3 = smollm3_family:FAMILY\n")
    monkeypatch.syspath_prepend(packages)
    registry.installed_families.cache_clear()
    yield
    registry.installed_families.cache_clear()


@pytest.fixture(scope="module")
def hf_smollm3() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(**FIELDS, initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write_pipeline(project: Any, **changes: str) -> Path:
    fields = ", ".join(f"{name}: {value}" for name, value in {"use_sliding_window": "false", **changes}.items())
    return project.pipeline(("{model_type: qwen3,", f"{{model_type: smollm3, {fields},"))


def test_it_is_unknown_until_it_is_installed(project) -> None:
    registry.installed_families.cache_clear()
    assert project.only_problem(write_pipeline(project)).place == "model.init.model_type"


@pytest.mark.usefixtures("smollm3")
class TestInstalled:
    def test_a_pipeline_with_it_is_valid(self, project) -> None:
        check_file(write_pipeline(project))

    @pytest.mark.parametrize(
        ("field", "value"), [("use_sliding_window", "true"), ("num_key_value_heads", "3"), ("rms_norm_eps", "-1.0")]
    )
    def test_its_fields_are_checked(self, project, field: str, value: str) -> None:
        if field == "num_key_value_heads":
            path, place = write_pipeline(project), "model.init"
            path.write_text(path.read_text().replace("num_key_value_heads: 2", f"num_key_value_heads: {value}"))
        else:
            path, place = write_pipeline(project, **{field: value}), f"model.init.{field}"
        problem = project.only_problem(path)
        assert problem.place == place
        assert value in problem.message

    def test_it_has_a_shape_and_flops(self, hf_smollm3: Any) -> None:
        shape = registry.shape_of(FIELDS)
        assert shape.parameters == sum(tensor.numel() for tensor in hf_smollm3.parameters())
        linear = [tensor for name, tensor in hf_smollm3.named_parameters() if ".layers." in name and tensor.dim() == 2]
        flops = model_flops(shape)
        assert flops.per_token == 2 * sum(tensor.numel() for tensor in linear)
        assert flops.forward(np.array([10]), 4) > 10 * flops.per_token

    def test_a_pipeline_with_it_has_a_plan(self, project) -> None:
        from dagrl.backends.fit import fit
        from dagrl.scheduler.placement import make_plan

        checked = check_file(write_pipeline(project))
        pipeline = checked.loaded.pipeline
        assert fit(pipeline, make_plan(pipeline, checked.graph)).shape.family == "smollm3"

    def test_the_engine_computes_what_hugging_face_computes(
        self, run_ranks: Callable[..., list[Any]], load_chunks: Any, megatron_spec: Any, hf_smollm3: Any
    ) -> None:
        rows = sequences(59)

        def on_rank(rank: int) -> Any:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

            with torch.no_grad():
                logits = run_packed(load_chunks(hf_smollm3, megatron_spec(2))[0], rows)
                return gather_from_tensor_model_parallel_region(logits)[:, :59].log_softmax(-1).numpy()

        with torch.no_grad():
            alone = torch.cat([hf_smollm3(row[None]).logits[0] for row in rows]).log_softmax(-1)
        for logprobs in run_ranks(2, on_rank):
            torch.testing.assert_close(torch.from_numpy(logprobs), alone, atol=1e-5, rtol=0)
