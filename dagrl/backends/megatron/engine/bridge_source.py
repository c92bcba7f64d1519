"""Adapts a `WeightSource` to megatron-bridge. Imports megatron-bridge; see `bridge_library`."""

from __future__ import annotations

import copy
from collections.abc import KeysView, Mapping
from typing import TYPE_CHECKING

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dagrl.backends.runtime.initial_weights import WeightSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def knows(hf_config: PretrainedConfig) -> bool:
    return _architecture(hf_config) in AutoBridge.list_supported_models()


def auto_bridge(
    hf_config: PretrainedConfig, source: WeightSource | None = None, padded_rows: Mapping[str, int] | None = None
) -> AutoBridge[PreTrainedCausalLM]:
    """The bridge of a supported model; with `source` it can load weights.

    `padded_rows` maps tensors to be padded with rows of zeros to their number of rows.
    """
    config = copy.deepcopy(hf_config)
    # Configs of folders name their class, but configs of `model.init` do not.
    config.architectures = [_architecture(hf_config)]
    if source is None:
        return AutoBridge.from_hf_config(config)
    return AutoBridge(_Pretrained(config, _State(source, padded_rows or {})))


def _architecture(hf_config: PretrainedConfig) -> str | None:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)


class _State(StateSource):
    def __init__(self, source: WeightSource, padded_rows: Mapping[str, int]) -> None:
        self._source = source
        self._padded_rows = padded_rows
        self._names = dict.fromkeys(source.names())

    def get_all_keys(self) -> KeysView[str]:
        # A keys view, because a list would make loading a mixture of many experts quadratic.
        return self._names.keys()

    def load_tensors(self, keys: list[str]) -> dict[str, torch.Tensor]:
        return {key: self._load(key) for key in keys}

    def _load(self, key: str) -> torch.Tensor:
        tensor = self._source.get(key)
        missing = self._padded_rows.get(key, len(tensor)) - len(tensor)
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


class _Pretrained(PreTrainedCausalLM):
    """A config with its weights, which megatron-bridge otherwise loads by a model's name."""

    def __init__(self, config: PretrainedConfig, source: _State) -> None:
        super().__init__()
        self.config = config
        self._state = StateDict(source)

    @property
    def state(self) -> StateDict:
        return self._state
