"""What is left out of published weights, and what is refused."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dagrl.model_files.tensor_names import check_names, is_predicting

WANTED = {"model.norm.weight"}


def config(**fields: int | None) -> Any:
    made = SimpleNamespace(model_type="llama", num_hidden_layers=4, **fields)
    made.get_text_config = lambda: made
    return made


@pytest.mark.parametrize(
    ("names", "fields", "fragment"),
    [
        (["model.layers.4.enorm.weight"], {}, "hold 1 tensor that a llama of this config does not have"),
        (["model.layers.4.enorm.weight"], {"num_nextn_predict_layers": None}, "hold 1 tensor"),
        (["model.layers.5.enorm.weight"], {"num_nextn_predict_layers": 1}, "'model.layers.5.enorm.weight' among them"),
        (["extra", "other"], {}, "hold 2 tensors that a llama of this config does not have, 'extra' among them"),
        (["model.norm.weight_scale_inv"], {}, "are in 8 bits, with scales beside them"),
    ],
)
def test_tensors_unknown_to_the_model_are_refused(names: list[str], fields: dict, fragment: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_names([*WANTED, *names], WANTED, config(**fields))
    assert fragment in str(caught.value)


def test_missing_tensors_are_named_unless_they_follow_from_the_config(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_names([*WANTED, "model.layers.0.self_attn.rotary_emb.inv_freq"], WANTED, config())
        assert caplog.messages == []
        check_names([*WANTED, "model.layers.4.a", "model.layers.5.b"], WANTED, config(num_nextn_predict_layers=2))
    (message,) = caplog.messages
    assert message.startswith("the weights hold 2 tensors of layers that predict further tokens (model.layers.4.a and")


def test_layers_of_the_model_itself_predict_the_next_token_only() -> None:
    assert not is_predicting("model.layers.3.enorm.weight", config(num_nextn_predict_layers=1))
    assert is_predicting("model.layers.4.enorm.weight", config(num_nextn_predict_layers=1))
