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
from dagrl.model_files.tokenizer import make_tokenizer
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


def test_earlier_imports_stay():
    with without_packages("json"):
        assert importlib.import_module("json") is json
    assert sys.modules["json"] is json


def test_a_tokenizer_imports_no_torch_and_patches_nothing_for_good():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CONFIG = """
import sys
from dagrl.model_files.library_model import architecture, load_hf_config
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


MODEL = """
import sys
from dagrl.backends.hf.model import unset_model
from dagrl.config.schema import ModelSpec, TokenizerSpec
from dagrl.model_files.library_model import auto_class, load_hf_config, model_imports

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
sizes |= {"num_key_value_heads": 1, "head_dim": 8}
spec = TokenizerSpec(kind="characters", alphabet="0123456789+=")
given = ModelSpec(init={"model_type": "qwen3", **sizes}, tokenizer=spec)
with model_imports(given):
    config = load_hf_config(given)
    model = unset_model(auto_class(config), config)
import torch
from transformers import DynamicCache, masking_utils, utils

rows, known = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
model(rows, attention_mask=known, past_key_values=DynamicCache(config=model.config))
found = {"torch._dynamo", "sympy", "scipy", "sklearn", "torchaudio", "torchvision", "torchao"} & sys.modules.keys()
assert not found, f"a model has imported {found}"
assert utils.is_scipy_available() and utils.is_torchvision_available() and utils.is_torchaudio_available()

at = {"q_length": 3, "kv_length": 3, "batch_size": 2}
mask = masking_utils.sdpa_mask(**at, use_vmap=True, allow_is_causal_skip=False)
assert mask.tolist() == masking_utils.sdpa_mask(**at, allow_is_causal_skip=False).tolist()
assert "torch._dynamo" in sys.modules
"""


def test_a_model_imports_no_compiler_and_what_is_left_out_is_there_when_asked_for():
    done = subprocess.run([sys.executable, "-c", MODEL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


STORED = """
import json, sys
from pathlib import Path
from dagrl.model_files.library_model import load_hf_config, model_imports
from dagrl.config.schema import ModelSpec

folder = Path(sys.argv[1])
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
config = {"model_type": "qwen3", "vocab_size": 16, "num_key_value_heads": 1, "head_dim": 8, **sizes}
(folder / "config.json").write_text(json.dumps(config))
model = ModelSpec(path=folder)
read = load_hf_config(model)
with model_imports(model):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(read)
found = {"torch._dynamo", "torchao"} & sys.modules.keys()
assert not any(sys.modules[each] for each in found), f"a model has imported {found}"
"""


def test_a_stored_model_is_built_without_a_compiler_too(tmp_path):
    done = subprocess.run([sys.executable, "-c", STORED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TRAINER = """
import sys
import torch
import dagrl.backends.megatron.engine.megatron_engine
from dagrl.backends.megatron.engine.cpu.adam import FusedAdam

if torch.cuda.is_available():
    sys.exit()
compiler = torch.compile
weight = torch.nn.Parameter(torch.ones(1))
optimizer = FusedAdam([weight])
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
found = {"torch._dynamo", "torch._inductor", "transformers"} & sys.modules.keys()
assert not found, f"a trainer has imported {found}"
assert torch.compile is compiler and compiler.__module__ == "torch"
"""


def test_a_trainer_without_a_gpu_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_trial_of_an_agent_imports_no_ray():
    program = "import dagrl.orchestrator.agent_trial, sys; assert not {'ray', 'torch'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_exports_import_no_megatron():
    program = "import dagrl.backends.megatron.stored.convert, sys; assert 'megatron' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_distributions_of_a_module_are_those_of_the_full_search():
    whole = importlib.metadata.packages_distributions()
    for module in ("torch", "yaml", "PIL", "six", "google", "flash_attn", "_pytest", "no_such_module"):
        assert distributions_of(module) == whole.get(module, []), module
