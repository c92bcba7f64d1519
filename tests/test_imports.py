"""Imports without packages that a run never uses: nothing is missing afterwards."""

import importlib
import importlib.metadata
import json
import subprocess
import sys

import pytest

from dagrl.imports import distributions_of, without_packages

PROGRAM = """
import importlib.metadata, importlib.util, sys
from dagrl.data.tokenizer import make_tokenizer
from dagrl.config.schema import TokenizerSpec

whole = importlib.metadata.packages_distributions
tokenizer = make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+="))
assert tokenizer.decode(tokenizer.encode("3+4=")) == "3+4="
found = {"torch", "sklearn", "transformers.modeling_gguf_pytorch_utils"} & sys.modules.keys()
assert not found, f"a tokenizer has imported {found}"
assert importlib.metadata.packages_distributions is whole

import transformers.tokenization_utils_tokenizers as tokenizers
from transformers.utils import import_utils

found = import_utils.PACKAGE_DISTRIBUTION_MAPPING
assert found["torch"] == ["torch"] and found["yaml"] == ["PyYAML"], found
assert found.get("yaml") == ["PyYAML"] and found.get("no_such_module", 1) == 1
assert import_utils.is_torch_available() and import_utils.get_torch_version() == importlib.metadata.version("torch")
try:
    tokenizers.load_gguf_checkpoint("no such file")
except (ImportError, OSError):
    pass  # the real one says that gguf is not installed, or that there is no such file
import transformers.modeling_gguf_pytorch_utils as gguf
assert importlib.util.find_spec(gguf.__name__).origin == gguf.__file__
assert "torch" in sys.modules
"""


def test_a_hidden_package_is_missing_in_the_context_only():
    with without_packages("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    assert importlib.util.find_spec("this") is not None


def test_what_was_imported_before_stays():
    with without_packages("json"):
        assert importlib.import_module("json") is json
    assert sys.modules["json"] is json


def test_a_tokenizer_imports_no_torch_and_patches_nothing_for_good():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CONFIG = """
import sys
from dagrl.backends.model_source import architecture, load_hf_config
from dagrl.config.schema import ModelSpec, TokenizerSpec

tokenizer = TokenizerSpec(kind="characters", alphabet="0123456789+=")
config = load_hf_config(ModelSpec(init={"model_type": "qwen3", "hidden_size": 8}, tokenizer=tokenizer))
assert architecture(config) == "Qwen3ForCausalLM"
assert (config.hidden_size, config.head_dim) == (8, 128)
found = {"transformers.generation.utils", "transformers.models.auto.modeling_auto", "sklearn"} & sys.modules.keys()
assert not found, f"a config has imported {found}"
"""


def test_a_config_imports_no_code_of_models():
    """Transformers needs it to write docstrings, for five seconds."""
    done = subprocess.run([sys.executable, "-c", CONFIG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exports_import_no_megatron():
    program = "import dagrl.backends.megatron.stored.convert, sys; assert 'megatron' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_distributions_of_a_module_are_those_of_the_full_search():
    whole = importlib.metadata.packages_distributions()
    for module in ("torch", "yaml", "PIL", "six", "google", "flash_attn", "_pytest", "no_such_module"):
        assert distributions_of(module) == whole.get(module, []), module
